"""A finished measurement, made without a server."""

from __future__ import annotations

import numpy as np

from staffel.bench.results import Interval, Probe, Result
from staffel.bench.stats import attainment
from staffel.bench.steady import unsteady, window
from staffel.config import SLO
from tests.bench.virtual import FINE, Server

OF = SLO(ttft=0.16, tpot=0.03)


def probe(rate: float, seed: int = 0, server: Server | None = None) -> Probe:
    scheduled = np.random.default_rng(seed).exponential(1 / rate, 300).cumsum()
    records = (server or Server()).records(scheduled)
    start, end = bounds = window(records, OF)
    share = attainment([r for r in records if start <= r.scheduled < end], OF)
    verdict = "above" if share.low >= 0.9 else "below" if share.high < 0.9 else "unclear"
    return Probe(
        rate=rate, window=bounds, records=records, attainment=share, throughput=rate,
        unsteady=unsteady(records, bounds, rate), verdict=verdict, generator=FINE,
    )  # fmt: skip


FOUND = Interval(18.0, 17.0, 19.0)


def result(label: str, goodput: Interval | None = FOUND, **more) -> Result:
    fields = {
        "kind": "goodput", "command": "staffel bench goodput URL", "started": "2026-01-01",
        "versions": {"staffel": "0"}, "url": "http://127.0.0.1:8000/v1", "model": "m",
        "workload": "fixed:10,3", "arrivals": "poisson", "seed": 0, "slo": OF, "target": 0.9,
        "devices": 2, "label": label, "probes": [probe(rate) for rate in (5, 15, 24)],
        "goodput": goodput,
    }  # fmt: skip
    return Result(**{**fields, **more})
