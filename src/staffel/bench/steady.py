"""Which part of a run counts, and whether the server was in steady state in it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import stdtrit

from staffel.bench.outcomes import known_at
from staffel.bench.records import Record
from staffel.bench.stats import BATCHES, Floats, lag_one
from staffel.config import SLO

MIN_REQUESTS = 50
"""Fewer than that in the window don't show a backlog, let alone an attainment."""
TURNOVERS = 3
"""The window must be so many times as long as a request takes, or nothing can have settled."""
ON_TIME = 0.95
"""Least share of the requests scheduled in the window that were sent in it."""
REACHED = 0.9
"""Share of the usual number in flight at which the warm-up is over."""
GROWTH = 0.02
"""A backlog grows if it gains more than this share of the arrivals, surely."""
DOUBT = 0.005
"""Chance of taking a steady run for one whose backlog grows."""


def window(records: Sequence[Record], slo: SLO) -> tuple[float, float]:
    """The scheduled arrivals that count, [start, end) in seconds. Empty where none does.

    Warm-up: what was sent before there were 90 % as many in flight as on average over the second
    half of the run. The rule looks at the load only, so it can't cut away a bad stretch because
    it was bad, as one that looks at latencies could (MSER, for one).

    Cool-down: what was sent from the first request on whose outcome wasn't known when the last one
    was sent: it lived, in part, under a falling load, or hasn't ended at all. Order of arrival and
    not of completion decides, since the quick ones complete first.

    A cut never takes more than half of the run: a request that hangs for longer counts, as a miss.

    Args:
        records: all requests sent, in order of arrival; `ended` None for open ones.
    """
    if not records:
        return 0.0, 0.0
    last = records[-1].scheduled
    middle = (records[0].scheduled + last) / 2
    unknown = (r.scheduled for r in records if r.scheduled > middle and known_at(r, slo) > last)
    return min(_warm(records), middle), next(unknown, last)


def _warm(records: Sequence[Record]) -> float:
    """Scheduled time of the first request that met about as many in flight as usual."""
    scheduled = np.array([record.scheduled for record in records])
    seen = np.arange(len(records)) - np.searchsorted(np.sort(_ends(records)), scheduled, "right")
    usual = math.floor(REACHED * seen[len(seen) // 2 :].mean())
    return float(scheduled[np.argmax(seen >= usual)])


def unsteady(records: Sequence[Record], window: tuple[float, float], rate: float) -> str | None:
    """Why the run says little about a steady state at `rate` requests/s; None: it was in one.

    Args:
        records: all requests sent, in order of arrival.
        window: from `window`.
    """
    start, end = window
    counted = [record for record in records if start <= record.scheduled < end]
    return (
        too_short(counted, end - start)
        or _behind(records, window, rate)
        or growing(records, window)
    )


def too_short(counted: Sequence[Record], length: float) -> str | None:
    """What a longer run would mend: too few requests count, or over too few turnovers.

    Args:
        counted: the records in the window, which is `length` seconds long.
    """
    if len(counted) < MIN_REQUESTS:
        return (
            f"only {len(counted)} requests count, after warm-up and cool-down; "
            f"at least {MIN_REQUESTS} are needed"
        )
    usual = residence(counted)
    if math.isinf(usual):
        return "at least half of the requests that count never ended"
    if length >= TURNOVERS * usual:
        return None
    return (
        f"the measured {length:.3g} s are under {TURNOVERS} times the {usual:.3g} s "
        "that a request takes"
    )


def residence(records: Sequence[Record]) -> float:
    """Median seconds from scheduled arrival to the end; infinite if half of them never ended."""
    if not records:
        return 0.0
    scheduled = np.array([record.scheduled for record in records])
    # "higher": no mean of a number and infinity
    return float(np.quantile(_ends(records) - scheduled, 0.5, method="higher"))


def _behind(records: Sequence[Record], window: tuple[float, float], rate: float) -> str | None:
    start, end = window
    asked = sum(start <= record.scheduled < end for record in records)
    sent = sum(start <= record.sent < end for record in records)
    if sent >= ON_TIME * asked:
        return None
    return f"requests were sent at {rate * sent / asked:.3g}/s where {rate:.3g}/s were asked"


def growing(
    records: Sequence[Record], window: tuple[float, float], doubt: float = DOUBT
) -> str | None:
    """How the backlog grew over the window; None: not surely, or not by much.

    A straight line through the mean number in flight of ten stretches of the window; its slope's
    error from the residuals, widened by the correlation of neighbouring ones.
    """
    levels = _in_flight(records, window)
    place = np.arange(BATCHES) - (BATCHES - 1) / 2
    slope = place @ levels / (place @ place)
    residuals = levels - levels.mean() - slope * place
    noise = residuals @ residuals / (BATCHES - 2) * (1 + 2 * lag_one(residuals))
    sure = slope - stdtrit(BATCHES - 2, 1 - doubt) * math.sqrt(noise / (place @ place))
    arrivals = sum(window[0] <= record.scheduled < window[1] for record in records)
    if not arrivals or sure * BATCHES <= GROWTH * arrivals:
        return None
    return (
        f"the backlog grows: {levels[0]:.3g} in flight at the start of the measured time, "
        f"{levels[-1]:.3g} at its end"
    )


def _in_flight(records: Sequence[Record], window: tuple[float, float]) -> Floats:
    """Mean number in flight in each of ten equal stretches of the window."""
    edges = np.linspace(*window, BATCHES + 1)
    width = max(edges[1] - edges[0], math.ulp(1.0))
    begins = np.array([record.scheduled for record in records])
    inside: Floats = np.diff(_spent(edges, begins) - _spent(edges, _ends(records)))
    return inside / width


def _spent(edges: Floats, moments: Floats) -> Floats:
    """For each edge, the seconds since the moments that lie before it, summed."""
    moments = np.sort(moments)
    before = np.searchsorted(moments, edges)
    sums = np.concatenate([[0.0], np.cumsum(np.where(np.isinf(moments), 0, moments))])
    return before * edges - sums[before]


def _ends(records: Sequence[Record]) -> Floats:
    return np.array([math.inf if record.ended is None else record.ended for record in records])
