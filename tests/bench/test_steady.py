"""What counts of a run, and whether it was in steady state: by rule."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from staffel.bench.records import Record
from staffel.bench.steady import MIN_REQUESTS, growing, residence, unsteady, window
from staffel.config import SLO
from tests.bench.virtual import Server, at, poisson

LAX = SLO(ttft=1000.0)


def run(rate: float, seconds: float, seed: int = 0, **server: float) -> list[Record]:
    """Cut at the end: what hadn't ended is open."""
    records = Server(**server).records(poisson(rate, seconds, np.random.default_rng(seed)))
    return [at(record, seconds) for record in records]


def why(records: Sequence[Record], rate: float, slo: SLO = LAX) -> str | None:
    return unsteady(records, window(records, slo), rate)


def test_the_warm_up_ends_when_the_usual_load_is_reached() -> None:
    """Requests take 20 s: until then the number in flight climbs, whatever the queue does."""
    records = run(5, 200, tpot=0.2, tokens=100)
    start, end = window(records, LAX)
    assert 12 < start < 40
    assert 170 < end < 185


def test_without_a_ramp_next_to_nothing_is_cut() -> None:
    start, end = window(run(5, 200, tpot=0.001), LAX)
    assert start < 5
    assert end > 195


def test_everything_that_counts_had_its_outcome_under_full_load() -> None:
    records = run(5, 100, tpot=0.2, tokens=20)
    start, end = window(records, LAX)
    counted = [record for record in records if start <= record.scheduled < end]
    assert len(counted) > 300
    assert all(record.ended is not None for record in counted)


def test_an_open_request_that_missed_its_deadline_has_an_outcome() -> None:
    """An overloaded server keeps nearly all open; they count all the same."""
    records = run(50, 20)
    tight, lax = (window(records, SLO(ttft=bound)) for bound in (0.5, 1000.0))
    assert tight[1] > 19
    assert lax[1] < 12


def test_a_request_that_hangs_does_not_hide_the_rest_of_the_run() -> None:
    records = run(5, 100)
    records[100] = msgspec.structs.replace(records[100], ended=None, chunks=[])
    start, end = window(records, LAX)
    assert end - start > 90


def test_the_cuts_do_not_shift_the_attainment() -> None:
    """A rule that looks at latencies would cut away bad stretches: this one doesn't."""
    slo = SLO(ttft=0.16)
    rate = Server().goodput(slo, 0.9)
    shares = []
    for seed in range(150):
        records = run(rate, 200 / rate, seed)
        start, end = window(records, slo)
        shares.append(np.mean([not r.missed(slo) for r in records if start <= r.scheduled < end]))
    assert np.mean(shares) == pytest.approx(0.9, abs=0.02)


def test_too_few_requests_are_said() -> None:
    assert f"at least {MIN_REQUESTS} are needed" in (why(run(5, 8), 5) or "")
    assert "only 0 requests" in (why([], 5) or "")


def test_a_run_shorter_than_its_requests_is_said() -> None:
    assert "that a request takes" in (why(run(20, 60, tpot=0.2, tokens=100), 20) or "")


def test_a_hundred_requests_into_an_overloaded_server_are_no_steady_state() -> None:
    """2.6 times what it can serve, and yet TTFT is good for most: no goodput may come of it."""
    records = run(65, 100 / 65, tpot=0.05, tokens=40)
    assert why(records, 65) is not None


def test_a_growing_backlog_is_said() -> None:
    reason = why(run(28, 60), 28)
    assert reason is not None
    assert "backlog grows" in reason


def test_a_late_sender_is_said() -> None:
    records = [msgspec.structs.replace(r, sent=r.scheduled * 1.2) for r in run(10, 60)]
    reason = why(records, 10)
    assert reason is not None
    assert "were asked" in reason


@pytest.mark.parametrize("load", [0.5, 0.7, 0.85])
def test_a_steady_run_is_rarely_called_unsteady(load: float) -> None:
    reasons = [why(run(load * 25, 60, seed), load * 25) for seed in range(40)]
    assert sum(reason is not None for reason in reasons) <= 2


def test_growth_is_found_when_it_is_slow() -> None:
    """8 % more than the server can take."""
    assert all(growing(records := run(27, 120, s), window(records, LAX)) for s in range(5))


def test_residence_of_requests_that_never_end() -> None:
    records = run(5, 20)
    assert residence(records) == pytest.approx(0.42, abs=0.02)
    assert residence([msgspec.structs.replace(r, ended=None) for r in records]) == float("inf")
