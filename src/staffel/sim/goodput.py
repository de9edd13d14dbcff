"""Goodput by simulation: bisection over the rate, with the same requests at every rate."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

from staffel.bench.arrivals import Arrivals, arrival_times
from staffel.bench.records import Record
from staffel.bench.steady import residence
from staffel.bench.workload import Workload
from staffel.config import SLO, ConfigError
from staffel.sim.models import Arrival, InstanceModel, LinkModel, Shell
from staffel.sim.outcome import Outcome
from staffel.sim.system import simulate

REQUESTS = 1000
PRECISION = 0.02
"""The bracket's width at which the bisection ends, as a share of the rate."""
TURNOVERS = 3
"""A run has so many times the requests that are in flight, or nothing could settle in it."""
_CLIMB = 1.5
_DESCEND = 2.0
_LEAST = 1e-3
"""Share of the capacity below which a goodput is called 0."""
_MIDDLE = (0.25, 0.75)
"""The part of the endings of a saturated run that its throughput is taken from."""

POISSON = Arrivals("poisson")


@dataclass(frozen=True)
class Probed:
    """One rate, simulated."""

    rate: float
    attainment: float
    good: bool
    """Whether the attainment reaches the target."""


@dataclass(frozen=True)
class SimulatedGoodput:
    """The highest rate found good, in requests/s; 0: not even a nearly idle system is."""

    rate: float
    capacity: float
    """Requests per second that the system serves when there always are more: no rate above it is
    sustained, however lax the SLO, and a short run can't tell that by itself. Where the goodput is
    below it, it may be estimated too low."""
    probes: tuple[Probed, ...]
    """In the order of the search. Bad ones may have ended early, at the attainment so far."""

    @property
    def attainment(self) -> float:
        """At the goodput."""
        return next((p.attainment for p in self.probes if p.rate == self.rate), 0.0)


def arrivals_at(
    workload: Workload, rate: float, requests: int, seed: int, process: Arrivals = POISSON
) -> list[Arrival]:
    """So many requests of the workload at a mean of `rate` a second.

    Equal seeds give equal lengths at every rate, and times that differ by a factor only, so that
    neighbouring rates are told apart with few requests (common random numbers).
    """
    times = arrival_times(process, rate, seed, workload.arrivals())
    pairs = zip(times, workload.lengths(seed), strict=False)
    return [
        Arrival(
            round(at * 1e9), lengths.prompt_tokens, lengths.output_tokens, lengths.prefix,
            lengths.block, lengths.shared,
        )
        for at, lengths in islice(pairs, requests)
    ]  # fmt: skip


def needs_token_times(slo: SLO) -> bool:
    """Whether the SLO speaks of single gaps between tokens."""
    return slo.itl_p99 is not None or slo.ema is not None


def simulated_goodput(
    instances: Sequence[InstanceModel],
    link: LinkModel | None,
    workload: Workload,
    slo: SLO,
    attainment: float = 0.9,
    *,
    seed: int = 0,
    requests: int = REQUESTS,
    process: Arrivals = POISSON,
    shell: Shell | None = None,
    precision: float = PRECISION,
    start: float | None = None,
    high: float = math.inf,
) -> SimulatedGoodput:
    """The highest rate at which `attainment` of the requests meet the SLO, by bisection.

    Args:
        requests: of each simulation, and more where so many say too little. Those that count are
            what is left of them after the benchmark's rule for warm-up and cool-down.
        start: the first rate to try. None: about the capacity.
        high: no rate above it is tried; nor is any above the capacity.

    Raises:
        ConfigError: an argument out of range, no placement, or one that can't serve a request.
    """
    _check(attainment, requests, precision)
    asked = partial(arrivals_at, workload, seed=seed, process=process)
    trial = _Trial(instances, link, asked, slo, attainment, shell)
    capacity = _Capacity(trial, requests)
    first = capacity.bound(min(start or capacity.rate, high))
    probes: list[Probed] = []
    rate: float | None = first
    while rate is not None:
        probes.append(trial.probe(rate, requests))
        rate = _next_rate(probes, lambda wanted: capacity.bound(min(wanted, high)), precision)
    good = max((probe.rate for probe in probes if probe.good), default=0.0)
    return SimulatedGoodput(good, capacity.rate, tuple(probes))


def _check(attainment: float, requests: int, precision: float) -> None:
    if not 0 < attainment <= 1:
        raise ConfigError("--attainment: must be above 0 and at most 1")
    if requests < 1:
        raise ConfigError("--requests: must be at least 1")
    if not 0 < precision < 1:
        raise ConfigError("precision: must be above 0 and below 1")


def _next_rate(
    probes: Sequence[Probed], bound: Callable[[float], float], precision: float
) -> float | None:
    """Between the highest good rate and the lowest bad one; by factors where one is missing."""
    low = max((probe.rate for probe in probes if probe.good), default=0.0)
    high = min((probe.rate for probe in probes if not probe.good), default=math.inf)
    if not low:
        return high / _DESCEND if high > _LEAST * probes[0].rate else None
    if high == math.inf:
        higher = bound(low * _CLIMB)
        return higher if higher > low else None
    return math.sqrt(low * high) if high > low * (1 + precision) else None


@dataclass(frozen=True)
class _Trial:
    """What is simulated, but for the rate and the number of requests."""

    instances: Sequence[InstanceModel]
    link: LinkModel | None
    asked: Callable[[float, int], list[Arrival]]
    """At a rate, so many."""
    slo: SLO
    target: float
    shell: Shell | None

    def probe(self, rate: float, requests: int) -> Probed:
        """With as many requests as it takes for the run to be some residences long."""
        while True:
            asked = self.asked(rate, requests)
            misses = _Misses(self.slo, (1 - self.target) * len(asked))
            outcome = simulate(
                self.instances, self.link, asked, token_times=needs_token_times(self.slo),
                shell=self.shell, stop=misses.count,
            )  # fmt: skip
            share = _attainment(outcome, self.slo, rate)
            if misses.too_many or share < self.target:
                return Probed(rate, share, good=False)
            wanted = TURNOVERS * rate * residence(outcome.records)
            if wanted <= requests or len(asked) < requests:
                return Probed(rate, share, good=True)
            requests = math.ceil(1.2 * wanted)

    def saturate(self, requests: int) -> Outcome:
        """All requests at once."""
        asked = [arrival._replace(at_ns=0) for arrival in self.asked(1.0, requests)]
        patient = replace(self.shell or Shell(), max_queue=len(asked))
        return simulate(self.instances, self.link, asked, shell=patient)


class _Capacity:
    """The rate of a saturated system, found with no more requests than the question takes."""

    def __init__(self, trial: _Trial, requests: int) -> None:
        self._trial = trial
        self._requests = requests
        self._measure()

    def _measure(self) -> None:
        outcome = self._trial.saturate(self._requests)
        self.rate = saturated_rate(outcome)
        self._settled = (
            self._requests >= TURNOVERS * _decoding(outcome)
            or len(outcome.records) < self._requests
        )

    def bound(self, rate: float) -> float:
        """`rate`, or the capacity where that is less. Few requests never fill a large system: what
        they show is too low, so more are tried before a rate is called too high."""
        while rate > self.rate and not self._settled:
            self._requests *= 2
            self._measure()
        return min(rate, self.rate)


def saturated_rate(outcome: Outcome) -> float:
    """Requests per second of a run whose arrivals came all at once, between ramp-up and drain.

    Raises:
        ConfigError: not one was served.
    """
    ends = sorted(r.ended for r in outcome.records if r.error is None and r.ended is not None)
    if not ends:
        raise ConfigError(f"placement: it can serve no request: {outcome.records[0].error}")
    first, last = (ends[int(share * (len(ends) - 1))] for share in _MIDDLE)
    if first == last:
        return len(ends) / ends[-1] if ends[-1] else math.inf
    # By moments, not by ranks: requests of equal length end in bursts.
    return (bisect_right(ends, last) - bisect_right(ends, first)) / (last - first)


def _decoding(outcome: Outcome) -> float:
    """Sequences that decode at a time, on average over the steps, in all instances together."""
    return sum(use.decode_tokens / use.steps for use in outcome.instances if use.steps)


class _Misses:
    """Counts the requests that missed, and ends a run once more have than may miss of all."""

    def __init__(self, slo: SLO, most: float) -> None:
        self.too_many = False
        self._slo = slo
        self._most = most
        self._missed = 0

    def count(self, record: Record) -> bool:
        self._missed += bool(record.missed(self._slo))
        self.too_many = self._missed > self._most
        return self.too_many


def _attainment(outcome: Outcome, slo: SLO, rate: float) -> float:
    counted = outcome.probe(slo, rate).counted() or outcome.records
    return sum(not record.missed(slo) for record in counted) / len(counted)
