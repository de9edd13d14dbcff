"""Joint quantile tables of prompt and output length: how a workload's shape is shipped.

A table keeps the quantiles of the prompt length, and, for each of S equally likely slices of it
from short to long, the quantiles of the output length. Between quantiles it interpolates
linearly. So both distributions and their dependence are kept, and no row of the source.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from random import Random

import msgspec
from msgspec import Struct

from staffel.bench.workload import Style


class Curve(Struct, frozen=True):
    """A distribution: `values[i]` is its quantile at `levels[i]`, from 0 to 1."""

    levels: tuple[float, ...]
    values: tuple[float, ...]

    def at(self, level: float) -> float:
        """The quantile at `level`, 0 <= level < 1."""
        right = bisect_right(self.levels, level)
        low, high = self.levels[right - 1], self.levels[right]
        part = (level - low) / (high - low)
        return self.values[right - 1] + part * (self.values[right] - self.values[right - 1])


class Slices(Struct, frozen=True):
    """A distribution for each of equally likely slices of the prompt length, short to long."""

    levels: tuple[float, ...]
    rows: tuple[tuple[float, ...], ...]

    def at(self, slice_level: float, level: float) -> float:
        """The quantile at `level` in the slice that the prompt length's level falls into."""
        row = self.rows[int(slice_level * len(self.rows))]
        return Curve(self.levels, row).at(level)


class Sessions(Struct, frozen=True):
    """How requests share prefixes. `staffel.bench.sessions` says how it is used."""

    block: int
    """Tokens of one block."""
    shared: Slices
    """Leading blocks in common with an earlier request; 1: the system prompt's only."""
    lag: Curve
    """How many requests ago that earlier one came."""


class Error(Struct, frozen=True):
    """How far a table is from its source: relative errors, such as 0.01 for 1 % too much."""

    mean: float
    p50: float
    p90: float
    p99: float


class Fidelity(Struct, frozen=True):
    prompt: Error
    output: Error
    rank_correlation: tuple[float, float]
    """Spearman's, of prompt and output length: in the source, in the table."""


class Table(Struct, frozen=True):
    """One shipped workload."""

    name: str
    source: str
    licence: str
    derived: str
    """What was done to the source's lengths."""
    style: Style
    rows: int
    """Requests that it was derived from."""
    prompt: Curve
    output: Slices
    fidelity: Fidelity
    below: int | None = None
    """Prompt and output together stay below it: what doesn't is drawn again."""
    sessions: Sessions | None = None

    def draw(self, rng: Random) -> tuple[float, int, int]:
        """The prompt length's level (0 to 1), the prompt's and the output's tokens."""
        while True:
            level = rng.random()
            prompt, output = self.sizes(level, rng.random())
            if self.below is None or prompt + output < self.below:
                return level, prompt, output

    def draws(self, seed: int) -> Iterator[tuple[float, int, int]]:
        """Endless; see `draw`."""
        rng = Random(f"{self.name}/{seed}")
        while True:
            yield self.draw(rng)

    def sizes(self, prompt_level: float, output_level: float) -> tuple[int, int]:
        prompt = self.prompt.at(prompt_level)
        output = self.output.at(prompt_level, output_level)
        return max(1, round(prompt)), max(1, round(output))


TABLES = (
    "chatbot",
    "code",
    "summarization",
    "azure-code",
    "azure-conversation",
    "mooncake-conversation",
)


@cache
def load(name: str) -> Table:
    """The shipped table of that name, one of TABLES."""
    data = files("staffel.bench").joinpath("data", f"{name}.json").read_bytes()
    return msgspec.json.decode(data, type=Table)
