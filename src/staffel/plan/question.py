"""What is planned for, and what a search finds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from staffel.bench.workload import Lengths
from staffel.config import SLO, ConfigError
from staffel.plan.candidates import Cluster, Engines, Group, Unit

Affinity = Literal["high", "low", "auto"]
Rank = tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is planned for."""

    cluster: Cluster
    engines: Engines
    lengths: Sequence[Lengths]
    """A sample of the workload, for bounds."""
    slo: SLO
    attainment: float = 0.9
    rate: float | None = None
    """Requests per second to be served; None: as many as the cluster can."""
    affinity: Affinity = "auto"

    def __post_init__(self) -> None:
        if not 0 < self.attainment < 1:
            raise ConfigError("--attainment: must be between 0 and 1")
        if self.rate is not None and not (math.isfinite(self.rate) and self.rate > 0):
            raise ConfigError("--rate: must be a number of requests per second above 0")
        if not self.engines.builds:
            raise ConfigError(
                f"--model: {self.engines.model} fits on no (tp, pp) of this cluster; "
                "give it more devices, or devices with more memory"
            )

    @property
    def kv_bytes_per_request(self) -> float:
        """Mean bytes of a handoff."""
        tokens = sum(each.prompt_tokens for each in self.lengths) / len(self.lengths)
        return tokens * self.engines.kv_bytes_per_token

    def rank(self, goodput: float, devices: int) -> Rank:
        """Smaller is better: the fewest devices for the rate, or the most requests at all."""
        if self.rate is None:
            return (-goodput, devices)
        if goodput >= self.rate:
            return (0, devices, -goodput)
        return (1, -goodput, devices)


@dataclass(frozen=True)
class Alone:
    """One phase of one instance, as if the other phase cost nothing."""

    group: Group
    goodput: float
    """Requests per second."""

    @property
    def per_device(self) -> float:
        return self.goodput / self.group.devices


@dataclass(frozen=True)
class Option:
    """A placement, with the goodput that was simulated for the unit that it repeats."""

    unit: Unit
    copies: int
    unit_goodput: float
    """Requests per second."""
    within_node: bool
    """Whether KV stays within a node."""

    @property
    def devices(self) -> int:
        return self.copies * self.unit.devices

    @property
    def goodput(self) -> float:
        return self.copies * self.unit_goodput

    @property
    def per_device(self) -> float:
        return self.goodput / self.devices

    @property
    def whole(self) -> Unit:
        return self.unit.times(self.copies)


@dataclass(frozen=True, kw_only=True)
class Found:
    """All that the search learnt; the best first."""

    prefill: list[Alone]
    decode: list[Alone]
    disaggregated: list[Option]
    colocated: list[Option]
    simulated: int
    """Candidates."""
    skipped: int
    """Candidates that a bound ruled out."""


@dataclass
class Log:
    """Counts what becomes of candidates, and tells who watches."""

    tell: Callable[[str, int, int], None] = lambda stage, done, left: None
    """Called with the stage, and its candidates that are simulated and that may follow."""
    simulated: int = 0
    skipped: int = 0
    _done: dict[str, int] = field(default_factory=dict)

    def wave(self, stage: str, size: int, left: int) -> None:
        self.simulated += size
        self._done[stage] = self._done.get(stage, 0) + size
        self.tell(stage, self._done[stage], left)
