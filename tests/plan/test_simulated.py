"""The planner with the real simulator behind it, on models that take no time to simulate."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import msgspec
import pytest
import yaml

from staffel.bench.workload import Lengths
from staffel.bench.workloads import parse_workload
from staffel.config import SLO, Placement
from staffel.latency.model import FittedModel, Regime
from staffel.plan.candidates import Build, Cluster, Engines, Parallel
from staffel.plan.frontier import best_of, draw, frontier
from staffel.plan.pool import Pool, Task
from staffel.plan.question import Question
from staffel.plan.result import Plan, Setting, conclude, ranking
from staffel.plan.search import search
from staffel.plan.trials import Seen, Trial
from staffel.sim.models import Shell

CORES = Cluster(
    nodes=1, devices_per_node=2, intra_node=4e9, inter_node=4e9, fixed_s=1e-4, beside=False
)
SMALL = FittedModel(
    prefill=(Regime(constant=0.02, per_prompt_token=1.5e-3, per_prompt=1e-3),),
    decode=(Regime(constant=0.03, per_decode=4e-3, per_decode_context=4e-6),),
    mixed=(
        Regime(constant=0.03, per_prompt_token=1.5e-3, per_decode=4e-3, per_decode_context=4e-6),
    ),
)
"""About a 135M model on one core: prompts are bound by arithmetic, tokens by reading weights."""


def engines(model: FittedModel = SMALL) -> Engines:
    builds = {Parallel(1, 1): Build(model, 20_000)}
    return Engines(
        model="HuggingFaceTB/SmolLM2-135M-Instruct", kv_bytes_per_token=46_080, builds=builds,
        max_sequences=64,
    )  # fmt: skip


class Here:
    """The pool's work, in this process."""

    width = 2

    def __init__(self, task: Task) -> None:
        self._task = task

    def goodputs(self, trials: Sequence[Trial]) -> list[float]:
        return [self._task.goodput(trial) for trial in trials]

    def at_rates(self, asked: Sequence[tuple[Trial, float]]) -> list[Seen]:
        return [self._task.at_rate(trial, rate) for trial, rate in asked]


def ask(workload: str, slo: SLO, cluster: Cluster = CORES, **more) -> tuple[Question, Task]:
    lengths = tuple(islice(parse_workload(workload).lengths(0), 1000))
    question = Question(cluster=cluster, engines=engines(), lengths=lengths[:200], slo=slo, **more)
    return question, Task(lengths, 0.9, 0, 60, Shell(), least=120)


def test_short_prompts_and_long_outputs_are_better_colocated():
    """A core that only prefills 40 tokens for each 200 that are decoded is nearly idle."""
    question, task = ask("fixed:40,200", SLO(ttft=1.0, tpot=0.2))
    found = search(question, Here(task))
    best = ranking(question, found)[0]
    assert best.whole.short() == "2C"
    assert best.goodput > 1.5 * found.disaggregated[0].goodput


def test_two_prefill_to_one_decode_simulated_together_beat_the_others_per_device():
    question, task = ask(
        "fixed:400,40", SLO(ttft=4.0, tpot=0.15),
        Cluster(nodes=1, devices_per_node=3, intra_node=4e9, inter_node=4e9, beside=False),
    )  # fmt: skip
    options = search(question, Here(task)).disaggregated
    assert options[0].whole.short() == "2P1D"
    others = [option for option in options if option.whole.short() != "2P1D"]
    assert all(options[0].per_device > other.per_device for other in others)


class Case:
    """A question with all its answers, found once."""

    def __init__(self) -> None:
        self.question, self.task = ask("fixed:400,20", SLO(ttft=3.0, tpot=0.07))
        self.here = Here(self.task)
        self.found = search(self.question, self.here)
        setting = Setting(
            basis="made up", workload="fixed:400,20", model=self.question.engines.model,
            serving={"dtype": "float32", "device": "cpu", "threads": 1}, device_word="core",
        )  # fmt: skip
        self.plan = conclude(self.question, self.found, setting, self.here)


@pytest.fixture(scope="module")
def case() -> Case:
    return Case()


def test_a_tight_bound_on_tokens_is_better_disaggregated(case):
    """A chunk that doesn't break the bound leaves prompts too little; apart, nothing does."""
    assert not ranking(case.question, case.found)[0].unit.colocated
    assert case.plan.verdict.startswith("Disaggregate: ")


def test_the_placement_is_one_that_serve_reads(case, tmp_path):
    file = tmp_path / "placement.yaml"
    file.write_text(case.plan.yaml)
    placement = Placement.load(file)
    assert placement.short() == "1P1D"
    assert placement.model == "HuggingFaceTB/SmolLM2-135M-Instruct"
    spec = placement.instances[0]
    assert (spec.threads, spec.dtype, spec.kv_bytes // 2**20) == (1, "float32", 878)
    assert "Disaggregate: " in case.plan.yaml.partition("model:")[0]  # says why


def test_the_answer_says_what_more_load_and_longer_outputs_do(case):
    shares = case.plan.sensitivity.attainment
    assert shares["0.8"] >= 0.9
    assert shares["1.2"] < shares["0.8"]
    goodputs = case.plan.sensitivity.goodput
    assert goodputs["1.2"] <= 1.05 * goodputs["0.8"]
    assert any("KV handoffs within nodes need" in note for note in case.plan.notes)


def test_a_plan_is_saved_whole(case, tmp_path):
    case.plan.save(tmp_path / "plan.json")
    assert msgspec.json.decode((tmp_path / "plan.json").read_bytes(), type=Plan) == case.plan


def test_what_serve_cannot_run_is_written_all_the_same():
    """And is refused by serve, by name."""
    wide = Engines(
        model="big", kv_bytes_per_token=1, builds={Parallel(2, 2): Build(SMALL, 20_000)},
        max_sequences=64,
    )  # fmt: skip
    cluster = Cluster(nodes=2, devices_per_node=4, intra_node=4e9, inter_node=4e9)
    lengths = [Lengths(400, 20)] * 1000
    question = Question(
        cluster=cluster, engines=wide, lengths=lengths[:10], slo=SLO(ttft=3.0, tpot=0.2)
    )
    here = Here(Task(tuple(lengths), 0.9, 0, 30, Shell(), least=60))
    setting = Setting(basis="made up", workload="fixed", model="big")
    plan = conclude(question, search(question, here), setting, here)
    written = yaml.safe_load(plan.yaml)
    assert written["hosts"] == 2
    assert all(spec["parallel"] == {"tp": 2, "pp": 2} for spec in written["instances"])


def test_the_frontier_falls_and_marks_the_slo(case, tmp_path):
    points = frontier(case.question, case.found, case.here)
    for colocated in (True, False):
        best = best_of([point for point in points if point.colocated is colocated])
        assert [p.per_device for p in best] == sorted(p.per_device for p in best)
        assert [p.per_user for p in best] == sorted((p.per_user for p in best), reverse=True)
    draw(points, case.question.slo.tpot, "core", tmp_path / "frontier.svg")
    assert "SLO: 14.3 tokens/s" in (tmp_path / "frontier.svg").read_text()


def test_the_pool_answers_like_a_single_process(case):
    unit = case.found.disaggregated[0].unit
    trial = Trial(
        instances=case.question.engines.instances(unit), link=None, slo=case.question.slo, high=1.5
    )
    with Pool(case.task, 2) as pool:
        assert pool.goodputs([trial, trial]) == [case.task.goodput(trial)] * 2
        assert pool.at_rates([(trial, 1.0)]) == [case.task.at_rate(trial, 1.0)]
