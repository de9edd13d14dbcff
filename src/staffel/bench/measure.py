"""Live measurements: one rate, several rates, and the search for the goodput.

The only part of the benchmark that has a clock and an endpoint; what the figures mean and where
the search goes next is decided by `stats`, `steady`, `judge` and `search`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice, takewhile
from time import monotonic
from typing import Protocol

import msgspec

from staffel.bench.arrivals import Arrivals, arrival_times
from staffel.bench.endpoint import Endpoint
from staffel.bench.judge import Judge, probe_of, verdict_of
from staffel.bench.load import run_load
from staffel.bench.prompts import PromptMaker
from staffel.bench.records import Chunk, Record
from staffel.bench.results import Generator, Interval, Probe, Verdict
from staffel.bench.search import GoodputSearch
from staffel.bench.sender import Counts
from staffel.bench.workload import Ask, Lengths, Workload, shortened_note
from staffel.config import SLO, ConfigError

PAUSE_S = 1.0
"""Between two probes: a server that was left with a backlog drops it when connections close."""
STALE_S = 0.5
"""How old the news of open requests may be."""
DRAIN_S = 120.0
"""How long after the last arrival a probe waits for requests that still run; then they missed."""

Plan = list[tuple[float, Ask]]


class Subject:
    """What is measured, with what: everything that stays the same over a measurement."""

    def __init__(
        self,
        endpoint: Endpoint,
        workload: Workload,
        maker: Callable[[int], PromptMaker],
        arrivals: Arrivals,
        *,
        seed: int,
        processes: int | None = None,
    ) -> None:
        """`maker` makes the maker of a probe's prompts, from its seed: never the same twice, or
        the server's prefix cache would know them."""
        self.endpoint = endpoint
        self.workload = workload
        self.arrivals = arrivals
        self.processes = processes
        self.notes: list[str] = list(workload.notes)
        self._maker = maker
        self._seed = seed
        self._plans = 0

    def plan(self, rate: float, seconds: float | None, requests: int | None) -> Plan:
        """The requests of one probe, with new prompts each time."""
        if seconds is None and requests is None:
            raise ConfigError("--duration or --requests: give one of them")
        seed = self._next_seed()
        times = arrival_times(self.arrivals, rate, seed, self.workload.arrivals())
        if seconds is not None:
            times = takewhile(lambda at: at < seconds, times)
        pairs = list(zip(islice(times, requests), self.workload.lengths(seed), strict=False))
        asks = self.asks([lengths for _, lengths in pairs], seed)
        return [(at, ask) for (at, _), ask in zip(pairs, asks, strict=True)]

    def asks(self, wanted: Sequence[Lengths], seed: int | None = None) -> list[Ask]:
        """Prompts of these lengths."""
        maker = self._maker(self._next_seed() if seed is None else seed)
        for note in (*maker.notes, shortened_note(wanted)):
            if note and note not in self.notes:
                self.notes.append(note)
        return maker.asks(wanted)

    def _next_seed(self) -> int:
        self._plans += 1
        return 1000 * self._seed + self._plans


@dataclass
class Watch:
    """A probe while it runs: what a progress line shows."""

    rate: float
    slo: SLO
    plan: Plan
    counts: Counts = field(default_factory=Counts)
    records: list[Record] = field(default_factory=list)
    began: float = field(default_factory=monotonic)

    @property
    def elapsed(self) -> float:
        """Seconds on the run's clock, once a request has ended."""
        return monotonic() - self.began

    def hear(self, record: Record) -> None:
        """A request has ended. The first one sets the clock, which starts when the senders do."""
        if not self.records and record.ended is not None:
            self.began = monotonic() - record.ended
        self.records.append(record)

    def open_requests(self) -> list[Record]:
        """Those that should have been sent by now and haven't ended.

        When their first token came isn't known here, only that it did; it is taken to have come in
        time, which nothing but their end decides then.
        """
        ended = {record.index for record in self.records}
        waiting = set(self.counts.waiting)
        now = self.elapsed
        return [
            Record(
                index=index, scheduled=at, sent=at, asked_tokens=ask.output_tokens,
                chunks=[] if index in waiting else [Chunk(at, 1)],
            )
            for index, (at, ask) in enumerate(self.plan)
            if at <= now and index not in ended
        ]  # fmt: skip


class Audience(Protocol):
    """Who is told how it goes."""

    def show(self, watch: Watch) -> None:
        """Four times a second."""

    def tell(self, probe: Probe) -> None:
        """At a probe's end."""


class Measurement:
    """Probes of one subject under one SLO. `stop` ends it early; what there is stays usable."""

    def __init__(
        self,
        subject: Subject,
        slo: SLO,
        target: float,
        audience: Audience,
        stop: asyncio.Event,
    ) -> None:
        self.subject = subject
        self.slo = slo
        self.target = target
        self.stop = stop
        self.probes: list[Probe] = []
        self._audience = audience

    async def probe(
        self, rate: float, *, seconds: float | None, requests: int | None, early: bool = False
    ) -> Probe:
        """Measure one rate.

        Args:
            seconds, requests: whichever comes first ends the sending.
            early: may end as soon as its attainment is clearly above or below the target.
        """
        plan = self.subject.plan(rate, seconds, requests)
        watch = Watch(rate, self.slo, plan)
        judge = Judge(self.target, self.slo, rate)
        verdict: Verdict | None = None
        ending = asyncio.Event()

        def hear(record: Record) -> None:
            watch.hear(record)
            judge.add(record)

        def look(counts: Counts) -> None:
            nonlocal verdict
            watch.counts = counts
            self._audience.show(watch)
            if early and verdict is None:
                verdict = judge.tick(watch.elapsed - STALE_S, watch.open_requests())
            if verdict is not None or self.stop.is_set() or self._drained_out(watch):
                ending.set()

        generator = await run_load(
            self.subject.endpoint, plan, on_record=hear, on_progress=look, stop=ending,
            processes=self.subject.processes,
        )  # fmt: skip
        records = sorted(watch.records, key=lambda record: record.index)
        probe = self._make_probe(rate, records, generator, verdict)
        self.probes.append(probe)
        self._audience.tell(probe)
        return probe

    async def sweep(self, rates: Sequence[float], seconds: float) -> None:
        """One probe for each rate."""
        for rate in rates:
            if self.stop.is_set():
                return
            await self.probe(rate, seconds=seconds, requests=None)
            await self._pause()

    async def search(
        self, start_rate: float, budget_s: float, precision: float
    ) -> tuple[Interval | None, list[str]]:
        """The goodput in requests/s with its interval, and what the user should know."""
        search = GoodputSearch(self.target, self.slo, start_rate, budget_s, precision=precision)
        while not self.stop.is_set():
            plan = search.next_probe(monotonic())
            if plan is None:
                break
            probe = await self.probe(
                plan.rate, seconds=plan.max_seconds, requests=None, early=plan.early
            )
            if not self.stop.is_set():
                search.add(probe)
                await self._pause()
        return search.result()

    def _make_probe(
        self, rate: float, records: list[Record], generator: Generator, verdict: Verdict | None
    ) -> Probe:
        probe = probe_of(records, self.slo, rate, generator, verdict)
        if verdict is not None:
            return probe
        return msgspec.structs.replace(probe, verdict=verdict_of(probe, self.slo, self.target))

    @staticmethod
    def _drained_out(watch: Watch) -> bool:
        return watch.elapsed > watch.plan[-1][0] + DRAIN_S

    async def _pause(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self.stop.wait(), PAUSE_S)
