"""Goodput from all probes: a falling curve through their attainments, and where it crosses."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import isotonic_regression
from scipy.special import logit

from staffel.bench.results import Interval
from staffel.bench.stats import CONFIDENCE, Evidence, Floats, together

DRAWS = 500


@dataclass(frozen=True)
class Point:
    """What a probe says: at this rate (requests per second), that attainment."""

    rate: float
    evidence: Evidence


def goodput(points: Iterable[Point], target: float) -> Interval:
    """The rate at which the attainment falls to `target`, with its 95 % interval.

    Attainment can only fall as the rate rises, so the curve is the isotonic fit (pooled adjacent
    violators), each probe weighted by its requests, joined by straight lines of log odds over log
    rate. The interval is a parametric bootstrap: the probes' attainments are
    drawn anew from what is known of each, and the crossing is looked up again. 0 stands for "below
    the lowest rate probed", infinity for "above the highest".
    """
    merged = _merged(points)
    if not merged:
        return Interval(0.0, 0.0, math.inf)
    rates = np.log([point.rate for point in merged])
    numbers = np.array([float(point.evidence.requests) for point in merged])
    shares = np.array([point.evidence.share for point in merged])
    value = crossing(rates, shares, numbers, target)
    drawn = [crossing(rates, row, numbers, target) for row in _draws(merged)]
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail], method="nearest")
    return Interval(value, min(float(low), value), max(float(high), value))


def crossing(rates: Floats, shares: Floats, numbers: Floats, target: float) -> float:
    """Where the fit through `shares` (0 to 1) crosses `target`.

    Args:
        rates: log rates, rising. [n]
        numbers: requests behind each share. [n]
    """
    fit = isotonic_regression(shares, weights=numbers, increasing=False)
    starts = fit.blocks[:-1]
    levels = fit.x[starts]
    if levels[0] < target:
        return 0.0
    if levels[-1] >= target:
        return math.inf
    middles = np.add.reduceat(rates * numbers, starts) / fit.weights
    odds = logit(np.clip(levels, 0.5 / (fit.weights + 1), 1 - 0.5 / (fit.weights + 1)))
    first = int(np.searchsorted(-levels, -target, side="right")) - 1
    upper, lower = odds[first], odds[first + 1]
    share = np.clip((upper - logit(target)) / (upper - lower), 0, 1) if upper > lower else 0.5
    return float(np.exp(middles[first] + share * (middles[first + 1] - middles[first])))


def _merged(points: Iterable[Point]) -> Sequence[Point]:
    """One point for each rate, in order of rate; those without a request are left out."""
    same: dict[float, list[Evidence]] = defaultdict(list)
    for point in points:
        if point.evidence.requests:
            same[point.rate].append(point.evidence)
    return [Point(rate, together(same[rate])) for rate in sorted(same)]


def _draws(points: Sequence[Point]) -> Floats:
    """[DRAWS, points] attainments that could be. The same each time: a result is reproducible."""
    good, bad = np.array([point.evidence.counts() for point in points]).T
    return np.random.default_rng(0).beta(good + 0.5, bad + 0.5, size=(DRAWS, len(points)))
