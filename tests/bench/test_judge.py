"""When a probe may end: rarely wrong though it looks often, and not fooled by who ends first."""

from __future__ import annotations

import msgspec
import numpy as np

from staffel.bench.judge import Judge
from staffel.bench.records import Record
from staffel.config import SLO
from tests.bench.virtual import Server, poisson, watch

SLO_ = SLO(ttft=0.16)
TARGET = 0.9


def verdict(
    rate: float, seconds: float = 120, slo: SLO = SLO_, seed: int = 0, server: Server | None = None
) -> tuple[float, str | None]:
    arrivals = poisson(rate, seconds, np.random.default_rng(seed))
    records = (server or Server()).records(arrivals)
    return watch(records, Judge(TARGET, slo, rate), seconds, early=True)


def test_an_easy_rate_is_soon_called_above() -> None:
    when, found = verdict(8)
    assert found == "above"
    assert when < 40


def test_overload_is_called_below_within_seconds() -> None:
    when, found = verdict(40)
    assert found == "below"
    assert when < 6


def test_a_growing_backlog_is_below_while_all_requests_are_still_good() -> None:
    """The bound is a minute away; the queue will get there."""
    when, found = verdict(30, slo=SLO(ttft=60.0))
    assert found == "below"
    assert when < 30


def test_a_server_that_answers_nothing_is_below() -> None:
    """No request ever ends; each has missed as soon as its bound on TTFT is past."""
    judge = Judge(TARGET, SLO_, 10)
    silent = [Record(index=i, scheduled=i / 10, sent=i / 10, asked_tokens=5) for i in range(200)]
    found = [judge.tick(now, [r for r in silent if r.scheduled <= now]) for now in range(1, 20)]
    assert "below" in found


def test_the_quick_ones_that_end_first_do_not_decide() -> None:
    """Every second request takes 30 s and misses; in the first 30 s only good ones end."""
    times = poisson(8, 100, np.random.default_rng(0))
    quick, slow = Server(tokens=5), Server(tokens=301, tpot=0.1)
    mixed = [
        (slow if index % 2 else quick)._record(
            index, at, at + 0.04, at + (30.0 if index % 2 else 0.2)
        )
        for index, at in enumerate(times.tolist())
    ]
    _, found = watch(mixed, Judge(TARGET, SLO(ttft=0.16, tpot=0.05), 8), 29.0, early=True)
    assert found is None
    _, found = watch(mixed, Judge(TARGET, SLO(ttft=0.16, tpot=0.05), 8), 100.0, early=True)
    assert found == "below"


def test_many_looks_do_not_add_up_to_a_verdict() -> None:
    """At exactly the target either verdict is wrong; a 95 % interval at each look gives many."""
    rate = Server().goodput(SLO_, TARGET)
    found = [verdict(rate, 100, seed=seed)[1] for seed in range(40)]
    assert sum(v is not None for v in found) <= 6


def test_verdicts_are_right_away_from_the_target() -> None:
    rate = Server().goodput(SLO_, TARGET)
    low = [verdict(0.7 * rate, 200, seed=seed)[1] for seed in range(15)]
    high = [verdict(1.4 * rate, 200, seed=seed)[1] for seed in range(15)]
    assert "below" not in low
    assert low.count("above") >= 12
    assert "above" not in high
    assert high.count("below") >= 12


def test_an_unsteady_run_is_never_above() -> None:
    """All requests are good, but they take longer than the run lasts so far."""
    server = Server(service=0.001, tpot=0.1, tokens=400)
    judge = Judge(TARGET, SLO(ttft=1.0), 20)
    records = server.records(poisson(20, 45, np.random.default_rng(0)))
    early = [msgspec.structs.replace(r, ended=r.chunks[0].at + 1) for r in records[:20]]
    when, found = watch([*early, *records[20:]], judge, 45, early=True)
    assert found is None
    assert when == 45
