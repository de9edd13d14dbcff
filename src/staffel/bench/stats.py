"""How much a run tells: attainment with an interval that is honest about correlated requests.

Requests that wait in the same queue miss together, so n requests tell as little as n / inflation
independent ones: at a load of 0.7, 0.8 and 0.9 the inflation is about 12, 30 and 100. It is
estimated by the method of batch means (Law, Simulation Modeling and Analysis, section 9.5.3):
ten long batches are nearly independent, whatever the requests within them are. What is left of
the correlation between neighbouring batches is put back by its lag-1 term.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv, ndtri, stdtrit

from staffel.bench.outcomes import excess
from staffel.bench.records import Record
from staffel.bench.results import Interval
from staffel.config import SLO

BATCHES = 10
"""Few and long: with 20 or 30, short runs gave intervals that missed the truth too often."""
CONFIDENCE = 0.95
GRAIN = 2
"""Decimals of the excess that count: a drift of microseconds, far from the bound, says nothing."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Evidence:
    """A share of good requests, and how much it tells."""

    share: float
    requests: int
    inflation: float = 1.0
    """Of the variance of the share, by correlation."""
    freedom: int = BATCHES - 1
    """Degrees of freedom of `inflation`."""

    @property
    def effective(self) -> float:
        """How many independent requests would tell as much."""
        return self.requests / self.inflation

    def interval(self, confidence: float = CONFIDENCE) -> Interval:
        """Jeffreys interval at the effective number, never of zero width, not even at 0 or 1."""
        tail = (1 - confidence) / 2
        good, bad = self.counts(confidence)
        low = betaincinv(good + 0.5, bad + 0.5, tail) if self.share > 0 else 0.0
        high = betaincinv(good + 0.5, bad + 0.5, 1 - tail) if self.share < 1 else 1.0
        return Interval(self.share, min(float(low), self.share), max(float(high), self.share))

    def counts(self, confidence: float = CONFIDENCE) -> tuple[float, float]:
        """Effective good and bad requests.

        Cut by (z / t)² because the effective number is itself estimated, from few batches (Korn
        and Graubard, Confidence intervals for proportions with small expected number of positive
        counts, Survey Methodology 24, 1998).
        """
        tail = (1 - confidence) / 2
        number = self.effective * (ndtri(tail) / stdtrit(self.freedom, tail)) ** 2
        return number * self.share, number * (1 - self.share)


def together(parts: Sequence[Evidence]) -> Evidence:
    """Several runs at one rate.

    A run with a bad stretch shows more correlation than one without. Weighting each by its own
    effective number would favour the lucky ones, so the requests are pooled, and the inflations.
    """
    requests = sum(part.requests for part in parts)
    weights = [part.requests / requests for part in parts]
    return Evidence(
        share=sum(w * part.share for w, part in zip(weights, parts, strict=True)),
        requests=requests,
        inflation=sum(w * part.inflation for w, part in zip(weights, parts, strict=True)),
        freedom=sum(part.freedom for part in parts),
    )


def attainment(records: Sequence[Record], slo: SLO) -> Interval:
    """Share of the records that met the SLO, with its 95 % interval.

    Args:
        records: those that count, in order of arrival (`Probe.counted`). None at all gives an
            interval from 0 to 1.
    """
    return evidence(records, slo).interval()


def evidence(records: Sequence[Record], slo: SLO) -> Evidence:
    """What the records, in order of arrival, tell about the attainment."""
    bounds = slo.bounds()
    return evidence_of(np.array([excess(record, bounds) for record in records]))


def evidence_of(over: Floats) -> Evidence:
    """The same from the excess of each request over its SLO; at most 0 is good.

    The inflation is the larger one of the outcomes' and of the excess's ranks: where few requests
    miss, or none, the outcomes alone can't show how they hang together.
    """
    if not len(over):
        return Evidence(0.0, 0)
    good = (over <= 0).astype(float)
    ranks = np.unique(over.round(GRAIN), return_inverse=True)[1].astype(float)
    return Evidence(float(good.mean()), len(over), max(inflation(good), inflation(ranks)))


def inflation(values: Floats) -> float:
    """Variance of the mean of a series over that of as many independent values; at least 1.

    A series too short for ten batches of two is taken to tell as much as one value.
    """
    size = len(values) // BATCHES
    if size < 2:
        return float(len(values))
    spread = values.var()
    if spread == 0:
        return 1.0
    means = values[-size * BATCHES :].reshape(BATCHES, size).mean(axis=1)
    return max(1.0, float(size * means.var(ddof=1) / spread * (1 + 2 * lag_one(means))))


def lag_one(values: Floats) -> float:
    """Correlation of neighbours, within 0 and 0.5, its bias of -1/n taken out."""
    off = values - values.mean()
    total = off @ off
    if total == 0:
        return 0.0
    return float(np.clip(off[1:] @ off[:-1] / total + 1 / len(values), 0, 0.5))
