"""The goodput search on systems whose answer is known, and what must not lower it."""

from __future__ import annotations

import pytest

from staffel.bench.workloads import parse_workload
from staffel.config import SLO, ConfigError
from staffel.sim.goodput import arrivals_at, saturated_rate, simulated_goodput
from staffel.sim.models import IDEAL, LinkModel
from staffel.sim.system import simulate
from tests.bench.virtual import Server
from tests.sim.cases import Constant, Linear, at_once, model

CHAT = parse_workload("lognormal:100,0.5,20,0.5")


def test_goodput_of_m_d_1_is_the_exact_one() -> None:
    service, slo = 0.05, SLO(ttft=0.2)
    instances = [model("prefill", Constant(service), chunk_tokens=512), model("decode")]
    found = simulated_goodput(
        instances, None, parse_workload("fixed:512,1"), slo, requests=5_000, shell=IDEAL
    )
    assert found.rate == pytest.approx(Server(service=service).goodput(slo, 0.9), rel=0.05)


def test_a_lax_slo_gives_the_capacity_and_no_more() -> None:
    instances = [model("prefill", Constant(0.05), chunk_tokens=512), model("decode")]
    workload = parse_workload("fixed:512,1")
    found = simulated_goodput(instances, None, workload, SLO(ttft=1e6), shell=IDEAL)
    assert found.rate == found.capacity == pytest.approx(20, rel=1e-3)


def test_an_slo_that_a_lone_request_misses_gives_nothing() -> None:
    found = simulated_goodput(
        [model("colocated", Constant(0.05))], None, CHAT, SLO(ttft=0.04), requests=100
    )
    assert found.rate == 0
    assert not any(probe.good for probe in found.probes)


def test_a_run_that_was_ended_early_is_bad_whatever_its_window_says() -> None:
    """Here the window of such a run cuts away those that missed, and most never ended."""
    decode = model("decode", Constant(0.1, 0.1), max_sequences=4)
    found = simulated_goodput(
        [model("prefill", Constant(0.0)), decode], None, CHAT, SLO(tpot=0.13), requests=20, seed=1
    )
    assert any(probe.attainment >= 0.9 and not probe.good for probe in found.probes)


def test_the_same_seed_finds_the_same() -> None:
    instances = [model("prefill"), model("decode")]
    runs = [simulated_goodput(instances, None, CHAT, SLO(ttft=0.1), requests=300) for _ in range(2)]
    assert runs[0] == runs[1]


def test_a_faster_link_never_lowers_goodput() -> None:
    instances = [model("prefill"), model("decode", Linear(per_decode=1e-4), max_sequences=64)]
    rates = [
        simulated_goodput(
            instances, LinkModel(speed, 0.0, 1000), CHAT, SLO(ttft=0.1, tpot=0.004), requests=300
        ).rate
        for speed in (2e6, 8e6, 1e9)
    ]
    assert rates == sorted(rates)
    assert rates[0] < 0.7 * rates[-1]


@pytest.mark.parametrize("share", [0.1, 0.9, 3.0])
def test_where_the_search_begins_changes_little(share: float) -> None:
    instances = [model("prefill"), model("decode")]
    found = [
        simulated_goodput(instances, None, CHAT, SLO(ttft=0.1), requests=150, start=start).rate
        for start in (None, share * 70)
    ]
    assert found[0] == pytest.approx(found[1], rel=0.03)


def test_few_requests_do_not_make_a_large_system_look_small() -> None:
    """50 requests never fill a batch of 300, whose pace of 10 tokens/s is the same at any size."""
    decode = model("decode", Constant(0.1, 0.1), max_sequences=300)
    instances = [model("prefill", Constant(0.0)), decode]
    found = simulated_goodput(
        instances, None, parse_workload("fixed:10,21"), SLO(tpot=0.2), requests=50, shell=IDEAL
    )
    assert 0.7 * 300 / 2 < found.rate <= 300 / 2


def test_rates_share_their_lengths_and_scaled_times() -> None:
    slow, fast = arrivals_at(CHAT, 1.0, 50, 7), arrivals_at(CHAT, 4.0, 50, 7)
    assert [a[1:] for a in slow] == [a[1:] for a in fast]
    assert [a.at_ns for a in slow] == pytest.approx([4 * a.at_ns for a in fast], abs=4)


def test_capacity_of_a_decode_batch_is_its_pace() -> None:
    """A step of 0.1 s, 8 sequences at most, 20 tokens after the first: 8 / 2 s."""
    instances = [
        model("prefill", Constant(0.0)),
        model("decode", Constant(0.1, 0.1), max_sequences=8),
    ]
    outcome = simulate(instances, None, at_once(400, 10, 21), shell=IDEAL)
    assert saturated_rate(outcome) == pytest.approx(4.0, rel=0.06)


def test_a_placement_that_can_serve_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="it can serve no request"):
        simulated_goodput(
            [model("colocated", kv_tokens=64)], None, parse_workload("fixed:60,20"), SLO(ttft=1)
        )


@pytest.mark.parametrize(
    ("options", "named"),
    [({"attainment": 1.5}, "--attainment"), ({"requests": 0}, "--requests")],
)
def test_bad_options_are_named(options: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        simulated_goodput([model("colocated")], None, CHAT, SLO(ttft=1), **options)
