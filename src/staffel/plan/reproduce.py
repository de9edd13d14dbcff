"""DistServe's evaluation, with its authors' step times and this project's decisions.

Nothing is tuned to match. Step times are the authors' (see `distserve`), lengths are those of the
shipped workloads, and scheduling is the server's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from staffel.bench.workload import Lengths
from staffel.bench.workloads import parse_workload
from staffel.latency.model import Work
from staffel.plan import distserve
from staffel.plan.alone import alone_trial, limit
from staffel.plan.bounds import added, saturating_tokens
from staffel.plan.candidates import Cluster, Engines, Group, Parallel, Unit
from staffel.plan.colocated import CHUNKS, WHOLE_PROMPTS
from staffel.plan.pool import Pool, Task, draw
from staffel.plan.published import TOY_ALONE, TOY_SLO, Published
from staffel.plan.question import Log, Option, Question
from staffel.plan.search import search
from staffel.plan.together import place_trial
from staffel.plan.trials import Simulator
from staffel.sim.models import Shell

TESTBED = Cluster(nodes=4, devices_per_node=8, intra_node=600e9 / 2, inter_node=25e9 / 8)
"""The paper's: 4 nodes of 8 A100-80G, NVLink (600 GB/s, both ways together), 25 Gb/s Ethernet."""
CONTEXT = 2048
"""OPT's."""
ATTAINMENT = 0.9
INTERFERENCE_PROMPTS = (128, 256, 512, 1024, 2048)


@dataclass(frozen=True, kw_only=True)
class System:
    """A way to serve: the best of its units."""

    name: str
    question: Question
    unit: Unit
    goodput: float
    """Requests per second."""
    slo_scale: float | None = None
    """The tightest SLO, as a factor on the row's, at vLLM's goodput per GPU. None: it has none."""

    @property
    def per_gpu(self) -> float:
        return self.goodput / self.unit.devices


@dataclass(frozen=True)
class Reproduced:
    """A published row, and what comes out here: vLLM as it ran comes first."""

    published: Published
    systems: list[System]

    def ratio(self, system: System) -> float:
        """Goodput per GPU over vLLM's; infinite where vLLM has none."""
        vllm = self.systems[0].per_gpu
        return system.per_gpu / vllm if vllm else float("inf")


def pool(workload: str, seed: int, requests: int) -> Pool:
    """Simulates the workload, cut to OPT's context."""
    drawn = draw(parse_workload(workload, max_model_len=CONTEXT), seed)
    return Pool(Task(drawn, ATTAINMENT, seed, requests, Shell()))


def reproduce(
    row: Published, lengths: Sequence[Lengths], simulator: Simulator, log: Log
) -> Reproduced:
    """Simulate one row's systems, and plan for it."""
    own = _question(distserve.engines("distserve", row.model), row, lengths)
    vllm = _question(distserve.engines("vllm", row.model), row, lengths)
    systems = [
        _best("vLLM, prefill first", vllm, [_prefill_first(row.vllm_tp)], simulator),
        _best("vLLM, chunked prefill", vllm, _chunked(row.vllm_tp), simulator),
        _best("DistServe, as published", own, [_published(own, row)], simulator),
        *_planned(own, simulator, log),
    ]
    return Reproduced(row, _with_scales(systems, simulator))


def _question(engines: Engines, row: Published, lengths: Sequence[Lengths]) -> Question:
    return Question(
        cluster=TESTBED,
        engines=engines,
        lengths=lengths,
        slo=row.slo,
        attainment=ATTAINMENT,
        affinity="low",
    )


def _best(name: str, question: Question, units: Sequence[Unit], simulator: Simulator) -> System:
    trials = [
        place_trial(question, unit, _limit(question, unit), within_node=True) for unit in units
    ]
    goodputs = simulator.goodputs(trials)
    goodput, unit = max(zip(goodputs, units, strict=True), key=lambda each: each[0])
    return System(name=name, question=question, unit=unit, goodput=goodput)


def _limit(question: Question, unit: Unit) -> float:
    return min(group.count * limit(question, group) for group in unit.groups)


def _prefill_first(tp: int) -> Unit:
    group = Group(
        role="colocated",
        parallel=Parallel(tp, 1),
        chunk_tokens=WHOLE_PROMPTS,
        policy="prefill-first",
    )
    return Unit((group,))


def _chunked(tp: int) -> list[Unit]:
    return [
        Unit((Group(role="colocated", parallel=Parallel(tp, 1), chunk_tokens=chunk),))
        for chunk in CHUNKS
    ]


def _published(question: Question, row: Published) -> Unit:
    """One prefill and one decode instance."""
    chunk = saturating_tokens(question.engines.builds[row.prefill].latency)
    return Unit(
        (
            Group(role="prefill", parallel=row.prefill, chunk_tokens=chunk),
            Group(role="decode", parallel=row.decode, chunk_tokens=chunk),
        )
    )


def _planned(question: Question, simulator: Simulator, log: Log) -> list[System]:
    """The planner's best with both phases apart, and its best colocated one."""
    found = search(question, simulator, log)
    kinds = (("planned, apart", found.disaggregated), ("planned, colocated", found.colocated))
    return [
        _as_system(name, question, max(options, key=lambda option: option.per_device))
        for name, options in kinds
        if options
    ]


def _as_system(name: str, question: Question, option: Option) -> System:
    return System(name=name, question=question, unit=option.unit, goodput=option.unit_goodput)


def _with_scales(systems: list[System], simulator: Simulator) -> list[System]:
    """How tight an SLO each meets at the rate per GPU at which vLLM just meets the row's."""
    rate = systems[0].per_gpu
    if not rate:
        return systems
    asked = [
        (
            place_trial(each.question, each.unit, each.goodput, within_node=True),
            rate * each.unit.devices,
        )
        for each in systems
    ]
    seen = simulator.at_rates(asked)
    return [
        replace(system, slo_scale=each.slo_scale)
        for system, each in zip(systems, seen, strict=True)
    ]


# ---- the article's examples


def toy(lengths: Sequence[Lengths], simulator: Simulator) -> dict[str, float]:
    """OPT-13B, one A100 for each instance: requests per second and GPU, named as in TOY."""
    one = Parallel(1, 1)
    row = Published(
        source="article", model="opt-13b", workload="", slo=TOY_SLO, prefill=one, decode=one,
        vllm_tp=1, rate_ratio=1,
    )  # fmt: skip
    own = _question(distserve.engines("distserve", row.model), row, lengths)
    vllm = _question(distserve.engines("vllm", row.model), row, lengths)
    both = _published(own, row)
    two_to_one = Unit((replace(both.group("prefill"), count=2), both.group("decode")))
    colocated = _best("colocated", vllm, [_prefill_first(1)], simulator)
    apart = _best("2P1D", own, [two_to_one], simulator)
    prefill, decode = simulator.goodputs(
        [
            alone_trial(own.engines.instance(group), slo, limit(own, group))
            for group, slo in zip(both.groups, TOY_ALONE, strict=True)
        ]
    )
    return {
        "colocated": colocated.per_gpu,
        "prefill only": prefill,
        "decode only": decode,
        "2P1D": apart.per_gpu,
    }


@dataclass(frozen=True)
class Interference:
    """A decode step, alone and with a whole prompt in it. Seconds."""

    prompt_tokens: int
    alone: float
    beside: float

    @property
    def ratio(self) -> float:
        return self.beside / self.alone


def interference(sequences: int = 1, context: int = 512) -> list[Interference]:
    """Of OPT-13B on one A100."""
    latency = distserve.engines("distserve", "opt-13b").builds[Parallel(1, 1)].latency
    decode = Work.decode(sequences, context)
    alone = latency.step_seconds(decode)
    return [
        Interference(prompt, alone, latency.step_seconds(added(Work.prefill(prompt), decode)))
        for prompt in INTERFERENCE_PROMPTS
    ]
