"""What a simulation gave: the benchmark's own records, and what went on inside."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from staffel.bench.judge import probe_of
from staffel.bench.records import Record
from staffel.bench.results import Generator, Probe
from staffel.config import SLO, Role
from staffel.control.jobs import Summary
from staffel.control.messages import Load
from staffel.latency.model import Work

_GENERATOR = Generator(lateness_p99=0.0, cpu_share=0.0, processes=0, kept_up=True)
"""Nobody is late in virtual time."""


class Sample(NamedTuple):
    """An instance at one moment."""

    at: float
    """Seconds."""
    running: int
    waiting: int
    pinned: int
    used: float
    """Share of its KV blocks that sequences hold."""


@dataclass(kw_only=True)
class Use:
    """What an instance did."""

    name: str
    role: Role
    devices: int
    steps: int = 0
    busy_s: float = 0.0
    prompt_tokens: int = 0
    decode_tokens: int = 0
    load: Load | None = None
    """As last reported."""
    samples: list[Sample] = field(default_factory=list)

    def count(self, work: Work, seconds: float) -> None:
        self.steps += 1
        self.busy_s += seconds
        self.prompt_tokens += work.prompt_tokens
        self.decode_tokens += work.decodes

    def sample(self, at: float) -> None:
        load = self.load
        if load is None:
            return
        used = 1 - (load.free_blocks + load.cached_blocks) / load.total_blocks
        self.samples.append(Sample(at, load.running, load.waiting, load.pinned, used))

    @property
    def preemptions(self) -> int:
        return self.load.preemptions if self.load is not None else 0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Everything that became of the arrivals. Times are seconds from the run's start."""

    records: list[Record]
    """One for each arrival that was sent, in their order, as the benchmark would have seen it."""
    summaries: list[Summary]
    """The router's own, of the requests that ended, in the order of their ends."""
    instances: list[Use]
    queue: list[tuple[float, int]]
    """Time, and how many requests waited in the router then."""
    seconds: float
    """When the last thing happened."""

    def utilisation(self, use: Use) -> float:
        """Share of the time in which the instance computed (with a pipeline: its first stage)."""
        return use.busy_s / self.seconds if self.seconds else 0.0

    def handoffs(self) -> list[float]:
        """Seconds from KV pinned to KV confirmed by the decode instance, waiting included."""
        return [s.handoff_ns / 1e9 for s in self.summaries if s.handoff_ns is not None]

    def reads(self) -> list[float]:
        """The part of them from when the decode instance had blocks."""
        return [s.read_ns / 1e9 for s in self.summaries if s.read_ns is not None]

    def probe(self, slo: SLO, rate: float) -> Probe:
        """As the benchmark judges a run at that rate: warm-up and cool-down are cut."""
        return probe_of(self.records, slo, rate, _GENERATOR)
