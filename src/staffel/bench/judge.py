"""When a probe has told enough: its attainment is clearly above or below the target."""

from __future__ import annotations

import math
from collections.abc import Iterable

from staffel.bench.outcomes import known_at
from staffel.bench.records import Record
from staffel.bench.results import Generator, Probe, Verdict
from staffel.bench.stats import Evidence, attainment, evidence
from staffel.bench.steady import MIN_REQUESTS, growing, unsteady, window
from staffel.config import SLO

NEXT_LOOK = 1.5
"""How many times as many at the next."""


def probe_of(
    records: list[Record],
    slo: SLO,
    rate: float,
    generator: Generator,
    verdict: Verdict | None = None,
) -> Probe:
    """A run at `rate` requests/s as it is judged: warm-up and cool-down are cut.

    Args:
        records: all requests sent, in order of arrival.
        verdict: what a `Judge` said of it.
    """
    start, end = bounds = window(records, slo)
    counted = [record for record in records if start <= record.scheduled < end]
    answered = sum(1 for record in counted if record.error is None and record.ended is not None)
    return Probe(
        rate=rate,
        window=bounds,
        records=records,
        attainment=attainment(counted, slo),
        throughput=answered / (end - start) if end > start else 0.0,
        unsteady=unsteady(records, bounds, rate),
        verdict=verdict,
        generator=generator,
    )


def verdict_of(probe: Probe, slo: SLO, target: float) -> Verdict:
    """What a run says that went to its end, every request with it."""
    few = len(probe.counted()) < MIN_REQUESTS
    share = second_half(probe.records, slo).interval() if few else probe.attainment
    if share.high < target:
        return "below"
    return "above" if share.low >= target and not few else "unclear"


def second_half(records: list[Record], slo: SLO) -> Evidence:
    """What the requests of a run's second half tell, be it warm-up, cool-down or neither.

    Both see less than the usual load, so their attainment can only look too good. That is enough to
    tell a rate that is too high from a run that is too short to show anything else: where requests
    pile up, all of it is warm-up and cool-down. Requests too few to count tell nothing.
    """
    middle = (records[0].scheduled + records[-1].scheduled) / 2 if records else 0.0
    late = [record for record in records if record.scheduled > middle]
    return evidence(late if len(late) >= MIN_REQUESTS else [], slo)


class Judge:
    """Watches one probe and says when it may end.

    Looking often and stopping at the first good moment would be wrong too often. So it looks only
    each time the known outcomes have grown by half, and the k-th look spends the part 6 / (pi k)²
    of the allowed error: all looks together spend it once, however they depend on each other
    (alpha spending: Lan and DeMets, Biometrika 70, 1983; a union bound over geometric looks, as in
    Howard et al., Time-uniform, nonparametric, nonasymptotic confidence sequences, 2021).
    """

    def __init__(self, target: float, slo: SLO, rate: float, error: float = 0.05) -> None:
        """
        Args:
            target: attainment that counts as good, 0 to 1.
            rate: requests per second asked for.
            error: chance of a wrong verdict.
        """
        self._target = target
        self._slo = slo
        self._rate = rate
        self._error = error
        self._ended: list[Record] = []
        self._looks = 0
        self._next_look = MIN_REQUESTS
        self._verdict: Verdict | None = None

    def add(self, record: Record) -> None:
        """A request has ended, well or badly."""
        self._ended.append(record)

    def tick(self, now: float, in_flight: Iterable[Record]) -> Verdict | None:
        """A verdict as soon as there is one, and the same ever after; None: go on.

        "above" needs a steady run; "below" comes from the attainment or from a growing backlog.
        A driver whose time is up without a verdict asks `verdict_of`.

        Args:
            now: seconds on the records' clock.
            in_flight: the open requests so far: `ended` None, the first chunk if it came (later
                ones aren't needed). One that is past its TTFT or E2E bound has missed already.
        """
        if self._verdict is None:
            self._verdict = self._judge(now, list(in_flight))
        return self._verdict

    def _judge(self, now: float, flying: list[Record]) -> Verdict | None:
        late = sum(known_at(record, self._slo) <= now for record in flying)
        known = len(self._ended) + late
        if known < self._next_look:
            return None
        self._looks += 1
        self._next_look = math.ceil(known * NEXT_LOOK)
        return self._look(sorted(self._ended + flying, key=lambda record: record.index))

    def _look(self, records: list[Record]) -> Verdict | None:
        error = self._error * 6 / (math.pi * self._looks) ** 2
        start, end = bounds = window(records, self._slo)
        counted = [record for record in records if start <= record.scheduled < end]
        if len(counted) < MIN_REQUESTS:  # one burst may be as long as that
            return None
        share = evidence(counted, self._slo).interval(1 - error)
        if share.high < self._target or growing(records, bounds, error / 2):
            return "below"
        if share.low >= self._target and unsteady(records, bounds, self._rate) is None:
            return "above"
        return None
