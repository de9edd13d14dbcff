"""The goodput of a phase by itself, at every parallelism that could be the best one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from staffel.config import SLO, Role
from staffel.latency.model import FittedModel, Regime
from staffel.plan import bounds
from staffel.plan.candidates import Group
from staffel.plan.prune import most_promising
from staffel.plan.question import Alone, Log, Question
from staffel.plan.trials import Simulator, Trial
from staffel.sim.models import InstanceModel

_MICROSECOND = (Regime(constant=1e-6),)
_INSTANT = FittedModel(prefill=_MICROSECOND, decode=_MICROSECOND, mixed=_MICROSECOND)
_WHOLE_PROMPTS = 2**20
_BOUNDED_BY = {"prefill": ("ttft",), "decode": ("tpot", "itl_p99", "ema")}


def phase_alone(question: Question, role: Role, simulator: Simulator, log: Log) -> list[Alone]:
    """Best goodput per device first. Of each pipeline depth, what can't be the best is left out:
    with low affinity both phases have the same depth.
    """
    limits = _limits(question, role)
    found = most_promising(
        limits,
        lambda wave: _goodputs(question, wave, limits, simulator),
        kind=lambda group: group.parallel.pp,
        width=simulator.width,
        stage=f"{role} alone",
        log=log,
    )
    good = [Alone(group, goodput) for group, goodput in found.items() if goodput > 0]
    return sorted(good, key=lambda alone: (-alone.per_device, alone.group.devices))


def limit(question: Question, group: Group) -> float:
    """Requests per second that an instance can't exceed; 0: even an idle one misses the SLO."""
    build, pp = question.engines.builds[group.parallel], group.parallel.pp
    lengths, slo, share = question.lengths, question.slo, question.attainment
    limits = []
    if group.role != "decode":
        if not bounds.prefill_feasible(build, lengths, slo, share):
            return 0.0
        limits.append(bounds.prefill_limit(build, pp, lengths))
    if group.role != "prefill":
        if not bounds.decode_feasible(build, lengths, slo, share):
            return 0.0
        limits.append(bounds.decode_limit(build, pp, lengths, slo.tpot))
    if group.role == "colocated":
        limits.append(bounds.colocated_limit(build, pp, lengths, slo.tpot))
    return min(limits)


def _limits(question: Question, role: Role) -> dict[Group, float]:
    """0 also for instances that leave no device for the other phase."""
    most = question.cluster.devices
    return {
        group: limit(question, group) if group.devices < most else 0.0
        for group in _groups(question, role)
    }


def _groups(question: Question, role: Role) -> Iterator[Group]:
    for parallel, build in question.engines.builds.items():
        chunk = bounds.saturating_tokens(build.latency)
        yield Group(role=role, parallel=parallel, chunk_tokens=chunk)


def _goodputs(
    question: Question, groups: Sequence[Group], limits: Mapping[Group, float], simulator: Simulator
) -> list[float]:
    """Where the SLO doesn't bound the phase, what it can't exceed stands for its goodput."""
    asked = {group: _trial(question, group, limits[group]) for group in groups}
    trials = {group: trial for group, trial in asked.items() if trial is not None}
    answers = dict(zip(trials, simulator.goodputs(list(trials.values())), strict=True))
    return [answers.get(group, limits[group]) for group in groups]


def _trial(question: Question, group: Group, most: float) -> Trial | None:
    bounds_of_slo = question.slo.bounds()
    kept = {name: bounds_of_slo[name] for name in _BOUNDED_BY[group.role] if name in bounds_of_slo}
    if not kept:
        return None
    return alone_trial(question.engines.instance(group), SLO(**kept), most)


def alone_trial(instance: InstanceModel, slo: SLO, high: float) -> Trial:
    """A prefill or decode instance that the other phase neither slows down nor costs anything."""
    if instance.role == "prefill":
        # Outputs end with their first token, so nothing is handed over.
        ends = replace(instance, role="colocated")
        return Trial(instances=(ends,), link=None, slo=slo, high=high, first_token_only=True)
    both = (_free_prefill(instance), instance)
    return Trial(instances=both, link=None, slo=slo, high=high)


def _free_prefill(decode: InstanceModel) -> InstanceModel:
    """Prompts cost it nothing, and it has memory enough for them to wait in."""
    return InstanceModel(
        role="prefill",
        latency=_INSTANT,
        kv_tokens=decode.kv_tokens,
        chunk_tokens=_WHOLE_PROMPTS,
        max_sequences=4 * decode.max_sequences,
        block_size=decode.block_size,
        devices=0,
    )
