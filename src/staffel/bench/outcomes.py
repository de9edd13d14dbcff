"""What a request's record says of the SLO, also while the request is still open."""

from __future__ import annotations

import math

from staffel.bench.records import Record
from staffel.config import SLO


def excess(record: Record, bounds: dict[str, float]) -> float:
    """The worst of its objectives, as a share of the bound: 0.1 is 10 % too slow.

    At most 0: it met them all. Infinite: it failed, or never ended. -1: nothing could be measured.

    Args:
        bounds: of the SLO, by objective (`SLO.bounds`).
    """
    if record.ended is None or record.error is not None or not record.chunks:
        return math.inf
    worst = -1.0
    for name, bound in bounds.items():
        value = getattr(record, name)
        if value is not None:
            worst = max(worst, (value - bound) / bound)
    return worst


def known_at(record: Record, slo: SLO) -> float:
    """When it was clear whether it meets the SLO: at its end, or when it missed a deadline.

    The only moments in question are the end and the bounds on TTFT and E2E; a token's time can't
    decide for good, since a mean may still recover.
    """
    moments = [math.inf if record.ended is None else record.ended]
    if slo.ttft is not None:
        deadline = record.scheduled + slo.ttft
        if not record.chunks or record.chunks[0].at > deadline:
            moments.append(deadline)
    if slo.e2e is not None:
        moments.append(record.scheduled + slo.e2e)
    return min(moments)
