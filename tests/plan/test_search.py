from __future__ import annotations

import pytest

from staffel.config import SLO, ConfigError
from staffel.plan.candidates import Parallel
from staffel.plan.result import Setting, conclude, ranking
from staffel.plan.search import search
from tests.plan.toy import Arithmetic, cluster, engines, question

SETTING = Setting(basis="made up", workload="fixed:100,11", model="toy")


def best(asked):
    return ranking(asked, search(asked, Arithmetic()))[0]


def test_worked_by_hand():
    """10 requests/s per prefill and 25 per decode instance, 1 / (1/10 + 1/25) = 7.14 colocated:
    5P2D make 50 on 7 devices (7.14 each), as colocated ones do, with decode memory of their own.
    """
    asked = question(7)
    found = search(asked, Arithmetic())
    assert found.prefill[0].goodput == pytest.approx(10)
    assert found.decode[0].goodput == pytest.approx(25)
    assert found.disaggregated[0].whole.short() == "5P2D"
    assert found.disaggregated[0].goodput == pytest.approx(50)
    assert found.colocated[0].goodput == pytest.approx(7 / (1 / 10 + 1 / 25))


def test_two_prefill_to_one_decode_beat_equal_numbers_and_the_reverse():
    asked = question(3)
    units = search(asked, Arithmetic()).disaggregated
    per_device = {option.whole.short(): option.per_device for option in units}
    assert units[0].whole.short() == "2P1D"
    assert per_device["2P1D"] == pytest.approx(20 / 3)
    assert all(per_device["2P1D"] > each for name, each in per_device.items() if name != "2P1D")


def test_a_rate_takes_the_fewest_devices_that_serve_it():
    option = best(question(12, rate=19.0, engines=engines(prompt_token_s=2e-4)))
    assert option.goodput >= 19
    assert option.devices == 2  # 1P1D: 25; one colocated instance: 16.7


def test_a_rate_beyond_the_cluster_gets_the_most_there_is_and_a_note():
    asked = question(2, rate=1000.0)
    plan = conclude(asked, search(asked, Arithmetic()), SETTING, Arithmetic())
    assert plan.recommended.goodput < 1000
    assert any("more than this cluster serves" in note for note in plan.notes)


def test_parallelism_that_is_worth_its_devices_is_taken_and_other_is_not():
    worth = best(question(8, engines=engines(tp2=2.5)))
    assert {group.parallel for group in worth.unit.groups} == {Parallel(2, 1)}
    wasteful = best(question(8, engines=engines(tp2=1.5)))
    assert {group.parallel for group in wasteful.unit.groups} == {Parallel(1, 1)}


def test_only_parallelism_that_meets_the_slo_is_taken():
    """A prompt takes 0.1 s at tp1 and 0.0667 at tp2; a token 20 and 13.3 ms."""
    asked = question(8, engines=engines(tp2=1.5), slo=SLO(ttft=0.08, tpot=0.1))
    found = search(asked, Arithmetic())
    assert {alone.group.parallel.tp for alone in found.prefill} == {2}
    assert found.disaggregated[0].unit.group("decode").parallel.tp == 1


def test_what_cannot_be_best_is_not_simulated():
    simulator = Arithmetic()
    asked = question(8, engines=engines(tp2=1.1, tp4=1.2, tp8=1.3))
    found = search(asked, simulator)
    assert found.skipped > 0
    prefills = [trial for trial in simulator.asked if trial.first_token_only]
    assert max(trial.instances[0].devices for trial in prefills) == 2  # one wave of two


def test_a_slow_link_between_nodes_keeps_pairs_within_a_node():
    """A request's KV is 100 kB. Nodes exchange 1 MB/s: 10 requests/s per whole node."""
    slow = cluster(4, nodes=2, inter_node=1e6)
    for affinity, within in (("auto", True), ("low", True), ("high", False)):
        asked = question(4, cluster=slow, affinity=affinity)
        option = search(asked, Arithmetic()).disaggregated[0]
        assert option.within_node is within


def test_the_slo_that_nothing_meets_is_said_to_be_so():
    asked = question(4, slo=SLO(ttft=0.01))
    with pytest.raises(ConfigError, match="no prefill instance computes prompts in time"):
        conclude(asked, search(asked, Arithmetic()), SETTING, Arithmetic())


def test_wrong_questions_are_refused():
    for field, more in (
        ("--attainment", {"attainment": 1.0}),
        ("--rate", {"rate": -1.0}),
    ):
        with pytest.raises(ConfigError, match=field):
            question(2, **more)
    empty = engines()
    with pytest.raises(ConfigError, match="fits on no"):
        question(2, engines=type(empty)(model="big", kv_bytes_per_token=1, builds={}))
