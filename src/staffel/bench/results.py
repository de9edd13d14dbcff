"""What a measurement writes: one JSON file that holds every request and every conclusion."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from staffel.bench.records import Record
from staffel.config import SLO, ConfigError

FORMAT = 1

Kind = Literal["run", "goodput", "sweep", "slo-scale", "interference", "slo"]
Verdict = Literal["above", "below", "unclear"]
"""Whether a probe's attainment is clearly above or below the target."""


class Interval(Struct, frozen=True, array_like=True):
    """An estimate with its 95 % confidence interval."""

    value: float
    low: float
    high: float


class Generator(Struct, frozen=True, kw_only=True):
    """How the load generator itself did."""

    lateness_p99: float
    """Seconds behind the schedule."""
    cpu_share: float
    """CPU seconds of all its processes per second of the run."""
    processes: int
    kept_up: bool
    """False: it was late so often that the figures are its own, not the server's."""
    lag_p99: float = 0.0
    """Seconds that its event loop, and so its time stamps, ran behind."""
    trouble: str | None = None
    """Why it didn't keep up, and what to do."""


class Probe(Struct, frozen=True, kw_only=True):
    """One rate, measured once."""

    rate: float
    """Requests per second, as scheduled."""
    window: tuple[float, float]
    """The scheduled arrivals that count: warm-up and cool-down lie outside."""
    records: list[Record]
    """All requests sent, those outside the window included."""
    attainment: Interval
    throughput: float
    """Completed requests per second inside the window."""
    unsteady: str | None
    """Why the run wasn't in steady state; None: it was."""
    verdict: Verdict | None
    """None where there was no target to compare with."""
    generator: Generator

    def counted(self) -> list[Record]:
        """The requests whose scheduled arrival lies inside the window."""
        start, end = self.window
        return [record for record in self.records if start <= record.scheduled < end]


class Interference(Struct, frozen=True, kw_only=True):
    """What prompts of one length do to the tokens of streams that decode meanwhile. Seconds."""

    prompt_tokens: int
    streams: int
    ttft: float
    """Median, of the prompts."""
    itl_alone: float
    """Mean gap between tokens of the streams while no prompt is computed."""
    itl_during: float
    """Mean gap of those that overlap a prompt's computation."""
    itl_worst: float
    """The longest of them, median over the prompts."""


class Result(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A whole measurement."""

    kind: Kind
    command: str
    """As it was typed."""
    started: str
    """ISO 8601, UTC."""
    versions: dict[str, str]
    url: str
    model: str
    """As the server reports it."""
    workload: str
    arrivals: str
    seed: int
    slo: SLO | None
    """None: the measurement has none (interference)."""
    target: float
    """Attainment that counts as good, 0 to 1."""
    devices: int
    """GPUs, or cores, that the endpoint runs on: goodput is divided by it."""
    label: str
    """How pictures and tables call it."""
    probes: list[Probe]
    goodput: Interval | None = None
    """Requests per second; None: not searched for, or not to be had (`notes` say why)."""
    scales: list[tuple[float, float]] = []
    """Of slo-scale: (scale, attainment under the SLO times it)."""
    interference: list[Interference] = []
    notes: list[str] = []
    interrupted: bool = False
    format: int = FORMAT

    @property
    def spoiled(self) -> str | None:
        """Why the figures don't count: the load generator couldn't keep up; None: they do.

        A search doesn't use such a probe, and its answer counts without.
        """
        if self.goodput is not None:
            return None
        late = [probe.generator for probe in self.probes if not probe.generator.kept_up]
        if not late:
            return None
        known = (generator.trouble for generator in late if generator.trouble)
        return next(known, "the load generator could not keep up")

    def save(self, path: Path) -> None:
        """JSON; compressed where the name ends in .gz."""
        data = msgspec.json.encode(self)
        path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)

    @classmethod
    def load(cls, path: Path) -> Result:
        """Raises ConfigError where the file isn't a result."""
        try:
            data = path.read_bytes()
            data = gzip.decompress(data) if path.suffix == ".gz" else data
            return msgspec.json.decode(data, type=cls)
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror or error}") from None
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}: is not a result of staffel bench: {error}") from None
