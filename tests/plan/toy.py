"""A model and a cluster small enough to plan by hand, and a simulator that is arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from staffel.bench.workload import Lengths
from staffel.config import SLO
from staffel.latency.model import FittedModel, Regime
from staffel.plan import bounds
from staffel.plan.candidates import Build, Cluster, Engines, Parallel
from staffel.plan.question import Question
from staffel.plan.trials import Seen, Trial
from staffel.sim.models import InstanceModel

LENGTHS = [Lengths(100, 11)]
"""100 prompt tokens; 10 tokens after the first."""


def engines(
    prompt_token_s: float = 1e-3, decode_s: float = 0.02, kv_tokens: int = 530, **speedups: float
) -> Engines:
    """At tp1: a prompt takes 0.1 s, and 5 sequences of 106 tokens decode in steps of 20 ms.

    So an instance prefills 10 requests per second, or decodes 5 / 0.02 / 10 = 25.
    `speedups`: by name of a (tp, pp), like tp2=1.5 times as fast, with the same memory.
    """
    builds = {Parallel(1, 1): Build(model(prompt_token_s, decode_s), kv_tokens)}
    for name, factor in speedups.items():
        parallel = Parallel(int(name.removeprefix("tp")), 1)
        builds[parallel] = Build(model(prompt_token_s / factor, decode_s / factor), kv_tokens)
    return Engines(model="toy", kv_bytes_per_token=1000, builds=builds)


def model(prompt_token_s: float, decode_s: float) -> FittedModel:
    return FittedModel(
        prefill=(Regime(per_prompt_token=prompt_token_s),),
        decode=(Regime(constant=decode_s),),
        mixed=(Regime(constant=decode_s, per_prompt_token=prompt_token_s),),
    )


def cluster(devices: int, nodes: int = 1, inter_node: float = 1e12) -> Cluster:
    return Cluster(nodes=nodes, devices_per_node=devices, intra_node=1e12, inter_node=inter_node)


def question(devices: int, **more) -> Question:
    fields = {
        "cluster": cluster(devices), "engines": engines(), "lengths": LENGTHS,
        "slo": SLO(ttft=1.0, tpot=0.1),
    }  # fmt: skip
    return Question(**{**fields, **more})


class Arithmetic:
    """Phases serve what they can't exceed; a colocated instance does one thing after the other."""

    width = 2

    def __init__(self) -> None:
        self.asked: list[Trial] = []

    def goodputs(self, trials: Sequence[Trial]) -> list[float]:
        self.asked += trials
        return [_goodput(trial) for trial in trials]

    def at_rates(self, asked: Sequence[tuple[Trial, float]]) -> list[Seen]:
        return [
            Seen(rate, 0.99 if rate <= _goodput(trial) else 0.5, 1.0, 50.0, 11 * rate, 1.0)
            for trial, rate in asked
        ]


def _goodput(trial: Trial) -> float:
    lengths = [
        Lengths(each.prompt_tokens, round(each.output_tokens * trial.output_factor))
        for each in LENGTHS
    ]
    if trial.first_token_only:
        return sum(_prefill(instance, lengths) for instance in trial.instances)
    if trial.instances[0].role == "colocated":
        return sum(_both(instance, lengths) for instance in trial.instances)
    prefill = sum(_prefill(i, lengths) for i in trial.instances if i.role == "prefill")
    decode = sum(_decode(i, lengths) for i in trial.instances if i.role == "decode")
    return min(prefill, decode)


def _prefill(instance: InstanceModel, lengths: Sequence[Lengths]) -> float:
    return bounds.prefill_limit(Build(instance.latency, instance.kv_tokens), instance.pp, lengths)


def _decode(instance: InstanceModel, lengths: Sequence[Lengths]) -> float:
    build = Build(instance.latency, instance.kv_tokens)
    return bounds.decode_limit(build, instance.pp, lengths, None)


def _both(instance: InstanceModel, lengths: Sequence[Lengths]) -> float:
    return 1 / (1 / _prefill(instance, lengths) + 1 / _decode(instance, lengths))
