"""Intervals that cover the truth although requests that queue together miss together."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from scipy.special import expit

from staffel.bench.fit import Point, goodput
from staffel.bench.outcomes import excess, known_at
from staffel.bench.records import Chunk, Record
from staffel.bench.stats import Evidence, attainment, evidence_of, inflation, together
from staffel.config import SLO
from tests.bench.virtual import Server, poisson, wait_within

LOAD = 0.694
SLACK = 3.0
"""P(wait <= 3 services) is 0.9 at a load of 0.694."""


def waits(number: int, rng: np.random.Generator, load: float = LOAD) -> np.ndarray:
    """Waits in M/D/1 with service 1, in steady state (Lindley)."""
    steps = 1 - rng.exponential(1 / load, number + 1000)
    walk = np.concatenate([[0.0], np.cumsum(steps)])
    return (walk - np.minimum.accumulate(walk))[1000 : 1000 + number]


def good(index: int = 0, **changes: object) -> Record:
    record = Record(
        index=index,
        scheduled=1.0,
        sent=1.0,
        asked_tokens=3,
        chunks=[Chunk(1.1, 1), Chunk(1.3, 2)],
        ended=1.3,
        tokens_from="ids",
    )
    return msgspec.structs.replace(record, **changes)


def test_the_exact_queue_agrees_with_a_long_simulation() -> None:
    server = Server(service=1.0)
    scheduled = poisson(0.7, 800_000, np.random.default_rng(1))
    wait = np.array(server._first(scheduled)) - 1.0 - scheduled
    for slack in (0.0, 0.5, 1.0, 3.3):
        exact = wait_within(0.7, 1.0, slack)
        assert (wait <= slack + 1e-9).mean() == pytest.approx(exact, abs=0.006)
    assert wait_within(LOAD, 1.0, SLACK) == pytest.approx(0.9, abs=0.001)


def test_the_interval_covers_the_truth_where_a_binomial_one_does_not() -> None:
    rng = np.random.default_rng(2)
    covered = naive = 0
    for _ in range(200):
        over = waits(1000, rng) - SLACK
        share = evidence_of(over)
        low, high = share.interval().low, share.interval().high
        covered += low <= 0.9 <= high
        lone = Evidence(share.share, 1000, freedom=10**6).interval()
        naive += lone.low <= 0.9 <= lone.high
    assert covered >= 0.92 * 200
    assert naive <= 0.7 * 200


def test_correlated_requests_tell_less_than_independent_ones() -> None:
    rng = np.random.default_rng(3)
    queue = np.mean([inflation((waits(4000, rng) <= SLACK).astype(float)) for _ in range(20)])
    alone = np.mean([inflation((rng.random(4000) < 0.9).astype(float)) for _ in range(20)])
    assert 8 < queue < 20
    assert alone < 2


@pytest.mark.parametrize("over", [-0.5, 0.5])
def test_no_interval_has_zero_width_at_none_or_all(over: float) -> None:
    share = evidence_of(np.full(200, over)).interval()
    assert share.high - share.low > 0.01
    assert share.value == (share.high if over < 0 else share.low)


def test_a_run_without_misses_still_shows_how_its_requests_hang_together() -> None:
    """Its waits are correlated: 300 of them tell less than 300 lone requests."""
    rng = np.random.default_rng(4)
    factors = [evidence_of(waits(300, rng) - 100).inflation for _ in range(20)]
    assert np.mean(factors) > 3


def test_nothing_counted_tells_nothing() -> None:
    share = attainment([], SLO(ttft=1.0))
    assert (share.low, share.high) == (0.0, pytest.approx(1.0, abs=0.01))


def test_failed_and_open_requests_are_in_the_denominator() -> None:
    slo = SLO(ttft=0.2)
    failed, still_open = good(error="HTTP 503"), good(ended=None)
    assert attainment([good(), good(), failed, still_open], slo).value == 0.5


def test_a_lucky_run_does_not_outweigh_an_unlucky_one() -> None:
    lucky = Evidence(1.0, 100, inflation=1.0)
    unlucky = Evidence(0.6, 100, inflation=20.0)
    both = together([lucky, unlucky])
    assert both.share == pytest.approx(0.8)
    assert both.effective < 100


def test_outcomes_agree_with_the_definition_of_a_miss() -> None:
    rng = np.random.default_rng(5)
    slo = SLO(ttft=0.2, tpot=0.1, itl_p99=0.12, e2e=0.6, ema=0.11)
    for _ in range(300):
        times = 1.0 + np.cumsum(rng.exponential(0.1, rng.integers(0, 6))).round(1)
        chunks = [Chunk(float(at), 1) for at in times]
        record = good(chunks=chunks, ended=float(times[-1]) if chunks else 1.5)
        assert (excess(record, slo.bounds()) <= 0) == (not record.missed(slo))
    assert excess(good(), {"ttft": 0.05}) == pytest.approx(1.0)
    assert excess(good(error="broken"), {"ttft": 9.0}) == math.inf


@pytest.mark.parametrize(
    ("record", "known"),
    [
        (good(), 1.3),
        (good(ended=None), math.inf),
        (good(ended=None, chunks=[]), 1.2),
        (good(ended=5.0, chunks=[Chunk(4.0, 1)]), 1.2),
        (good(ended=1.05, chunks=[], error="HTTP 503"), 1.05),
    ],
)
def test_an_outcome_is_known_at_the_end_or_at_a_missed_deadline(
    record: Record, known: float
) -> None:
    assert known_at(record, SLO(ttft=0.2, tpot=1.0)) == pytest.approx(known)


def test_an_open_request_has_missed_its_e2e_bound() -> None:
    assert known_at(good(ended=None), SLO(e2e=4.0)) == 5.0


def curve(rate: float) -> float:
    """Falls through 0.9 at 10 requests/s."""
    return float(expit(math.log(9) - 12 * math.log(rate / 10)))


def points(*rates: float, requests: int = 4000) -> list[Point]:
    return [Point(rate, Evidence(curve(rate), requests, inflation=10.0)) for rate in rates]


def test_the_fit_finds_the_crossing_of_a_smooth_curve() -> None:
    found = goodput(points(2, 8.2, 9.4, 10.8, 13, 20), 0.9)
    assert found.value == pytest.approx(10, rel=0.005)
    assert found.low < 10 < found.high
    assert found.high - found.low < 1.5
    assert found == goodput(points(2, 8.2, 9.4, 10.8, 13, 20), 0.9)


def test_less_evidence_gives_a_wider_interval() -> None:
    little, much = (goodput(points(8, 9.4, 10.8, 13, requests=n), 0.9) for n in (400, 4000))
    assert little.high - little.low > 2 * (much.high - much.low)


def test_violators_are_pooled() -> None:
    """One short unlucky run far below is outweighed by long ones above it."""
    unlucky = Point(7.0, Evidence(0.5, 40, inflation=4.0))
    found = goodput([*points(5, 9.4, 10.8, 13), unlucky], 0.9)
    assert found.value == pytest.approx(10, rel=0.03)


def test_a_crossing_outside_the_probed_rates_is_open() -> None:
    assert goodput(points(2, 4), 0.9).value == math.inf
    assert goodput(points(20, 30), 0.9).value == 0
    assert goodput([], 0.9).high == math.inf
