"""The search finds what can be computed, in virtual time, and says what it can't tell."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from scipy.optimize import brentq

from staffel.bench.results import Probe
from staffel.bench.search import GoodputSearch, ProbePlan
from staffel.bench.stats import attainment
from staffel.config import SLO, ConfigError
from tests.bench.virtual import (
    FINE,
    Outcome,
    Server,
    poisson,
    probe_of,
    run_probe,
    run_search,
    wait_within,
)

SLO_ = SLO(ttft=0.16)
TARGET = 0.9


def measured(
    server: Server, slo: SLO = SLO_, seed: int = 0, target: float = TARGET
) -> Callable[[ProbePlan], tuple[Probe, float]]:
    rng = np.random.default_rng(seed)
    return lambda plan: run_probe(server, plan, slo, target, rng)


def found(server: Server, budget: float = 900, seed: int = 0, **options: float) -> Outcome:
    search = GoodputSearch(TARGET, SLO_, 1.0, budget, **options)
    return run_search(search, measured(server, seed=seed))


def test_the_goodput_of_an_exact_queue() -> None:
    """Half an hour of virtual time: within 3 %, and inside the interval, in 18 of 20 searches."""
    server = Server()
    truth = server.goodput(SLO_, TARGET)
    values = [found(server, 1800, seed, precision=0.02).goodput for seed in range(20)]
    assert sum(g.low <= truth <= g.high for g in values) >= 18
    assert sum(abs(g.value / truth - 1) <= 0.03 for g in values) >= 18
    assert np.mean([g.value for g in values]) == pytest.approx(truth, rel=0.01)
    assert np.median([(g.high - g.low) / 2 / g.value for g in values]) < 0.05


def test_how_long_requests_take_is_not_learnt_from_an_overloaded_server() -> None:
    """Else the rates below one that couldn't be sent would seem to take too long to probe."""

    def probe(rate: float, tpot: float) -> Probe:
        records = Server(service=0.01, tpot=tpot).records(np.arange(0, 60, 1 / rate))
        return probe_of(records, SLO_, rate)

    search = GoodputSearch(TARGET, SLO_, 3.0, 600)
    search.next_probe(0.0)
    search.add(probe(3, tpot=0.2))
    assert search.next_probe(70.0).rate == pytest.approx(9)
    late = msgspec.structs.replace(FINE, kept_up=False)
    search.add(msgspec.structs.replace(probe(9, tpot=5), generator=late))
    plan = search.next_probe(400.0)
    assert plan is not None
    assert plan.rate == pytest.approx(27**0.5)


def test_it_ends_when_the_interval_is_narrow_enough() -> None:
    outcome = found(Server(), 3600, precision=0.1)
    goodput = outcome.goodput
    assert goodput.high - goodput.low <= 0.2 * goodput.value
    assert outcome.seconds < 1800
    assert outcome.notes == []


def test_a_short_budget_gives_a_wide_interval_and_says_so() -> None:
    outcome = found(Server(), 400, precision=0.02)
    assert outcome.goodput.low < Server().goodput(SLO_, TARGET) < outcome.goodput.high
    assert "wide" in outcome.notes[0]
    assert outcome.seconds < 410


def test_the_start_may_be_far_too_high() -> None:
    search = GoodputSearch(TARGET, SLO_, 300.0, 900)
    outcome = run_search(search, measured(Server()))
    assert outcome.goodput.value == pytest.approx(Server().goodput(SLO_, TARGET), rel=0.1)


def test_a_slow_server_and_a_first_rate_close_to_its_goodput() -> None:
    """0.87 requests/s: an hour holds few requests, and the first probe is as likely bad as good."""
    server, slo = Server(service=0.8, tpot=0.1, tokens=60), SLO(ttft=3.2, tpot=0.2)
    truth = server.goodput(slo, TARGET)
    goodputs = []
    for seed in range(10):
        search = GoodputSearch(TARGET, slo, 1.0, 3600)
        goodputs.append(run_search(search, measured(server, slo, seed)).goodput)
    assert all(goodputs)
    assert sum(g.low <= truth <= g.high for g in goodputs) >= 8
    short = run_search(GoodputSearch(TARGET, slo, 1.0, 900), measured(server, slo))
    assert any("may be too narrow" in note for note in short.notes)


def test_long_answers_and_a_short_budget() -> None:
    """A request takes 5 to 13 s, so the first probes at high rates are too short to say anything:
    made again for longer, or taken for a ceiling, they must not lead the search astray."""
    server, slo = Server(service=0.045, tpot=0.022, tokens=200, crowding=0.05), SLO(tpot=0.065)
    truth = 2.73  # from runs of 20,000 requests
    for seed in range(5):
        search = GoodputSearch(TARGET, slo, 1.0, 900)
        outcome = run_search(search, measured(server, slo, seed))
        assert outcome.goodput.value == pytest.approx(truth, rel=0.25)
        assert max(probe.rate for probe in outcome.probes) < 12


def test_a_run_without_a_settled_part_is_too_high_where_its_requests_miss() -> None:
    """Requests pile up, so all of it is warm-up and cool-down, and nothing counts."""
    server, slo = Server(service=0.01, tpot=0.02, tokens=200, crowding=0.1), SLO(tpot=0.05)
    run = measured(server, slo)
    search = GoodputSearch(TARGET, slo, 1.0, 900)
    search.next_probe(0.0)
    search.add(run(ProbePlan(1.0, 90.0, early=True))[0])
    probe, _ = run(ProbePlan(12.0, 16.0, early=True))
    assert len(probe.counted()) < 50
    assert probe.verdict == "below"
    search.add(probe)
    assert search.next_probe(140.0).rate < 12
    found, _ = search.result()
    assert 1 < found.value < found.high <= 12


def test_an_slo_that_even_an_idle_server_misses() -> None:
    outcome = found(Server(service=0.2))
    assert outcome.goodput is None
    assert "no goodput: even at 0.25 requests/s only 0.0%" in outcome.notes[0]
    assert outcome.seconds < 600


def test_a_server_that_never_misses_up_to_the_limit() -> None:
    outcome = found(Server(service=0.0001), max_rate=50.0)
    assert outcome.goodput is None
    assert "at least 50 requests/s" in outcome.notes[0]
    assert max(probe.rate for probe in outcome.probes) == 50


def test_a_budget_too_short_for_one_probe() -> None:
    outcome = found(Server(), 30)
    assert outcome.goodput is None
    assert "too short" in outcome.notes[0]


def test_a_probe_that_is_not_in_steady_state_is_not_good() -> None:
    """Every request is in time at any rate, but above 5/s the backlog grows."""

    def run(plan: ProbePlan) -> tuple[Probe, float]:
        arrivals = poisson(plan.rate, plan.max_seconds, np.random.default_rng(0))
        probe = probe_of(Server(service=1e-4).records(arrivals), SLO_, plan.rate, "above")
        grows = "the backlog grows" if plan.rate > 5 else None
        return msgspec.structs.replace(probe, unsteady=grows), plan.max_seconds

    outcome = run_search(GoodputSearch(TARGET, SLO_, 1.0, 900), run)
    assert outcome.goodput is None
    assert "at least" in outcome.notes[0]
    assert float(outcome.notes[0].split()[5]) <= 5
    assert "backlog grows" in outcome.notes[1]


def test_a_load_generator_that_cannot_keep_up_sets_the_limit() -> None:
    def run(plan: ProbePlan) -> tuple[Probe, float]:
        arrivals = poisson(plan.rate, plan.max_seconds, np.random.default_rng(0))
        probe = probe_of(Server(service=1e-4).records(arrivals), SLO_, plan.rate, "above")
        lame = msgspec.structs.replace(FINE, kept_up=plan.rate < 20)
        return msgspec.structs.replace(probe, generator=lame), 20.0

    outcome = run_search(GoodputSearch(TARGET, SLO_, 1.0, 900), run)
    assert outcome.goodput is None
    assert any("could not keep up" in note for note in outcome.notes)
    assert len(outcome.probes) < 10


def test_ten_requests_a_second_of_throughput_three_of_goodput() -> None:
    """The example that names the difference: the server keeps up with 10/s, its users don't."""
    server = Server(service=0.09)
    slack = brentq(lambda time: wait_within(3, 0.09, time) - TARGET, 0.0, 0.09)
    slo = SLO(ttft=0.09 + slack)
    assert server.goodput(slo, TARGET) == pytest.approx(3)

    arrivals = poisson(10, 300, np.random.default_rng(0))
    loaded = probe_of(server.records(arrivals), slo, 10)
    assert loaded.throughput == pytest.approx(10, rel=0.03)
    assert loaded.attainment.high < 0.5

    search = GoodputSearch(TARGET, slo, 1.0, 900)
    goodput = run_search(search, measured(server, slo)).goodput
    assert goodput.low < 3 < goodput.high
    assert goodput.value == pytest.approx(3, rel=0.06)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"target": 90}, "--attainment"),
        ({"start_rate": 0}, "start rate"),
        ({"budget_s": -1}, "--budget"),
        ({"precision": 0}, "--precision"),
        ({"max_rate": 0.5}, "max rate"),
    ],
)
def test_wrong_arguments_are_named(changes: dict[str, float], field: str) -> None:
    arguments = {"target": 0.9, "start_rate": 1.0, "budget_s": 900.0} | changes
    with pytest.raises(ConfigError, match=field):
        GoodputSearch(slo=SLO_, **arguments)


def short_probe(rate: float, verdict: str) -> Probe:
    """One that met the target, but in which too few requests count."""
    records = Server().records(np.arange(1, 20) / rate)
    share = attainment(records, SLO(ttft=0.16))
    return Probe(
        rate=rate, window=(0.0, 20 / rate), records=records, attainment=share, throughput=rate,
        unsteady="only 19 requests count", verdict=verdict, generator=FINE,
    )  # fmt: skip


def test_a_first_probe_that_was_too_short_is_made_again_for_longer() -> None:
    search = GoodputSearch(0.9, SLO(ttft=0.16), 2.0, 600)
    first = search.next_probe(0.0)
    search.add(short_probe(2.0, "unclear"))
    second = search.next_probe(60.0)
    assert second.rate == first.rate
    assert second.max_seconds > first.max_seconds


def test_a_search_in_which_nothing_counts_says_so() -> None:
    search = GoodputSearch(0.9, SLO(ttft=0.16), 2.0, 600)
    search.next_probe(0.0)
    search.add(short_probe(2.0, "below"))
    assert search.next_probe(60.0).rate < 2.0
    found, notes = search.result()
    assert found is None
    assert "no probe measured well" in notes[0]
    assert "only 19 requests count" in notes[1]
