"""The figures of one probe: what tables, pages and the quiet line show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from msgspec import Struct

from staffel.bench.records import Record
from staffel.bench.results import Probe, Result
from staffel.config import SLO

MEASURES = ("ttft", "tpot", "itl_p99", "e2e", "ema")
PERCENTILES = (50, 90, 99)


class Summary(Struct, frozen=True):
    """Over the requests whose scheduled arrival lies in the probe's window."""

    requests: int
    attainment: float
    """Share of all that were sent and met the whole SLO."""
    throughput: float
    """Requests per second that were answered, well or late."""
    good: float
    """Requests per second that met the whole SLO."""
    percentiles: dict[str, dict[int, float | None]]
    """By measure and percentile, in seconds, over the requests that have the measure."""
    missed: dict[str, int]
    """Requests that missed each objective; "failed" for those that failed."""
    errors: dict[str, int]
    """How often each error came."""


def summarise(probe: Probe, slo: SLO) -> Summary:
    """The figures of a probe under an SLO."""
    counted = probe.counted()
    span = max(probe.window[1] - probe.window[0], 1e-9)
    misses = [record.missed(slo) for record in counted]
    answered = [record for record in counted if record.error is None and record.chunks]
    met = sum(not missed for missed in misses)
    return Summary(
        requests=len(counted),
        attainment=met / len(counted) if counted else 0.0,
        throughput=len(answered) / span,
        good=met / span,
        percentiles={name: _percentiles(values(counted, name)) for name in MEASURES},
        missed=dict(Counter(name for missed in misses for name in missed)),
        errors=dict(Counter(r.error for r in counted if r.error is not None)),
    )


def values(records: Iterable[Record], measure: str) -> list[float]:
    """A measure of all requests that have it. Failed ones count as far as they came."""
    found = (getattr(record, measure) for record in records)
    return [value for value in found if value is not None]


def _percentiles(sample: Sequence[float]) -> dict[int, float | None]:
    return {share: percentile(sample, share) for share in PERCENTILES}


def percentile(sample: Sequence[float], share: int) -> float | None:
    """The nearest rank: a time that a request really had. None of nothing."""
    return float(np.percentile(sample, share, method="inverted_cdf")) if sample else None


def attainment_at_scales(
    probe: Probe, slo: SLO, scales: Sequence[float]
) -> list[tuple[float, float]]:
    """(scale, attainment) of one run's requests under the SLO times each scale."""
    return [(scale, summarise(probe, slo.scaled(scale)).attainment) for scale in scales]


def in_flight(records: Iterable[Record]) -> tuple[list[float], list[int]]:
    """Times, and how many requests were sent and not ended from each of them on."""
    steps = sorted(
        [(record.sent, 1) for record in records]
        + [(record.ended, -1) for record in records if record.ended is not None]
    )
    times = [at for at, _ in steps]
    return times, np.cumsum([step for _, step in steps], dtype=int).tolist()


def quiet_line(result: Result) -> str:
    """One line for scripts: key=value, seconds and requests per second."""
    if result.kind == "goodput":
        found = result.goodput
        if found is None and result.interrupted:
            return "no goodput found (interrupted)"
        if found is None:
            return "goodput=nan low=nan high=nan per_device=nan"
        per_device = found.value / result.devices
        return (
            f"goodput={found.value:.4g} low={found.low:.4g} high={found.high:.4g} "
            f"per_device={per_device:.4g}"
        )
    parts = []
    for probe in result.probes if result.slo is not None else []:
        summary = summarise(probe, result.slo)
        ttft, tpot = (summary.percentiles[name][90] for name in ("ttft", "tpot"))
        parts.append(
            f"rate={probe.rate:.4g} attainment={summary.attainment:.4f} "
            f"ttft_p90={_seconds(ttft)} tpot_p90={_seconds(tpot)} "
            f"throughput={summary.throughput:.4g} good={summary.good:.4g}"
        )
    return "\n".join(parts)


def _seconds(value: float | None) -> str:
    return "nan" if value is None else f"{value:.4g}"
