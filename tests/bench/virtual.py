"""A server and a driver in virtual time: nothing sleeps, and the right answer can be computed.

Prefill is an M/D/1 queue: Poisson arrivals, one at a time in order, each `service` seconds. Then
each request decodes beside the others, at a fixed time per token or at one that grows with the
number that decode at that moment.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
from scipy.optimize import brentq

from staffel.bench.judge import Judge, verdict_of
from staffel.bench.judge import probe_of as judged
from staffel.bench.records import Chunk, Record
from staffel.bench.results import Generator, Interval, Probe
from staffel.bench.search import GoodputSearch, ProbePlan
from staffel.config import SLO

FINE = Generator(lateness_p99=0.0, cpu_share=0.0, processes=1, kept_up=True)


def wait_within(rate: float, service: float, time: float) -> float:
    """P(wait <= time) in M/D/1 at `rate` arrivals/s (Erlang 1909; Tijms, A First Course in
    Stochastic Models, 9.2.3)."""
    terms = (
        (rate * (k * service - time)) ** k
        / math.factorial(k)
        * math.exp(rate * (time - k * service))
        for k in range(int(time / service + 1e-9) + 1)
    )
    return (1 - rate * service) * sum(terms)


@dataclass(frozen=True)
class Server:
    service: float = 0.04
    """Seconds of prefill."""
    tpot: float = 0.02
    tokens: int = 20
    crowding: float = 0.0
    """Growth of TPOT for each other request that decodes when this one starts to."""

    def goodput(self, slo: SLO, target: float) -> float:
        """Exact, for an SLO on TTFT alone."""
        slack = slo.ttft - self.service
        return brentq(
            lambda rate: wait_within(rate, self.service, slack) - target,
            1e-3 / self.service,
            0.999 / self.service,
        )

    def records(self, scheduled: np.ndarray) -> list[Record]:
        """One for each arrival, each run to its end."""
        first = self._first(scheduled)
        ends = self._ends(first)
        return [
            self._record(index, *times)
            for index, times in enumerate(zip(scheduled.tolist(), first, ends, strict=True))
        ]

    def _first(self, scheduled: np.ndarray) -> list[float]:
        """Lindley: a request starts when the one before it is done, or when it comes."""
        done, moments = -math.inf, []
        for at in scheduled.tolist():
            done = max(done, at) + self.service
            moments.append(done)
        return moments

    def _ends(self, first: list[float]) -> list[float]:
        decoding: list[float] = []
        ends = []
        for at in first:
            if self.crowding:
                decoding = [end for end in decoding if end > at]
            pace = self.tpot * (1 + self.crowding * len(decoding))
            ends.append(at + pace * (self.tokens - 1))
            decoding.append(ends[-1])
        return ends

    def _record(self, index: int, scheduled: float, first: float, end: float) -> Record:
        return Record(
            index=index,
            scheduled=scheduled,
            sent=scheduled,
            asked_tokens=self.tokens,
            chunks=[Chunk(first, 1), Chunk(end, self.tokens - 1)],
            ended=end,
            tokens_from="ids",
            status=200,
            finish="length",
        )


def poisson(rate: float, seconds: float, rng: np.random.Generator) -> np.ndarray:
    gaps = rng.exponential(1 / rate, size=int(rate * seconds * 1.2 + 50))
    times = np.cumsum(gaps)
    return times[times < seconds]


def at(record: Record, now: float) -> Record:
    """The record as it was known at `now`."""
    if record.ended <= now:
        return record
    chunks = [chunk for chunk in record.chunks if chunk.at <= now]
    return msgspec.structs.replace(record, ended=None, chunks=chunks, status=None, finish=None)


def watch(
    records: list[Record], judge: Judge, seconds: float, early: bool, step: float = 1.0
) -> tuple[float, str | None]:
    """Feed a judge until its verdict or the end: (when, verdict)."""
    coming, flying, verdict, now = deque(records), [], None, 0.0
    while now < seconds and not (early and verdict):
        now = min(now + step, seconds)
        while coming and coming[0].scheduled <= now:
            flying.append(coming.popleft())
        for record in flying:
            if record.ended <= now:
                judge.add(record)
        flying = [record for record in flying if record.ended > now]
        verdict = judge.tick(now, [at(record, now) for record in flying]) or verdict
    return now, verdict


def run_probe(
    server: Server, plan: ProbePlan, slo: SLO, target: float, rng: np.random.Generator
) -> tuple[Probe, float]:
    """A probe, and how long it took: until its verdict, or until its last request has ended."""
    records = server.records(poisson(plan.rate, plan.max_seconds, rng))
    judge = Judge(target, slo, plan.rate)
    stop, verdict = watch(records, judge, plan.max_seconds, plan.early)
    if verdict is not None and plan.early:
        known = [at(r, stop) for r in records if r.scheduled <= stop]
        return probe_of(known, slo, plan.rate, verdict), stop
    probe = probe_of(records, slo, plan.rate)
    verdict = verdict_of(probe, slo, target)
    return msgspec.structs.replace(probe, verdict=verdict), max(r.ended for r in records)


def probe_of(records: list[Record], slo: SLO, rate: float, verdict: str | None = None) -> Probe:
    """As the benchmark's own, of a load generator that kept up."""
    return judged(records, slo, rate, FINE, verdict or "unclear")


@dataclass
class Outcome:
    goodput: Interval | None
    notes: list[str]
    probes: list[Probe]
    seconds: float


def run_search(
    search: GoodputSearch, run: Callable[[ProbePlan], tuple[Probe, float]], pause: float = 1.0
) -> Outcome:
    """A whole search; `pause` seconds between probes for the server to empty."""
    now, probes = 0.0, []
    while plan := search.next_probe(now):
        probe, took = run(plan)
        now += took + pause
        search.add(probe)
        probes.append(probe)
    return Outcome(*search.result(), probes, now)
