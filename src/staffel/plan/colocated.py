"""Instances that do both phases, with the chunk of prompt that suits them best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from staffel.latency.model import LatencyModel, Work
from staffel.plan import bounds
from staffel.plan.alone import limit
from staffel.plan.candidates import Group, Unit, packs
from staffel.plan.prune import most_promising
from staffel.plan.question import Log, Option, Question
from staffel.plan.together import place_trial
from staffel.plan.trials import Simulator

CHUNKS = (64, 128, 256, 512, 1024, 2048)
WHOLE_PROMPTS = 4096
"""Most prompt tokens of a step of a prefill-first instance."""
_DECODES, _CONTEXT = 32, 512
"""A batch beside which a first guess of the chunk is made."""


def colocated(question: Question, simulator: Simulator, log: Log) -> list[Option]:
    """Best first: every parallelism at a likely chunk, then the best one with others."""
    limits = {group: limit(question, group) for group in _groups(question)}

    def goodputs(wave: Sequence[Group]) -> list[float]:
        return _goodputs(question, wave, limits, simulator)

    found = most_promising(
        limits, goodputs, kind=lambda _: None, width=simulator.width, stage="colocated", log=log
    )
    if any(found.values()):
        best = max(found, key=lambda group: found[group] / group.devices)
        found |= _tuned(question, best, found[best], limits[best], simulator, log)
    options = [
        option
        for group, each in found.items()
        if each
        for option in _options(question, group, each)
    ]
    return sorted(options, key=lambda each: question.rank(each.goodput, each.devices))


def likely_chunk(latency: LatencyModel, tpot: float | None) -> int:
    """The largest chunk that leaves a step beside it within the bound on the time per token."""
    if tpot is None:
        return CHUNKS[-1]
    fits = [chunk for chunk in CHUNKS if latency.step_seconds(_mixed(chunk)) <= tpot]
    return max(fits, default=CHUNKS[0])


def _mixed(chunk: int) -> Work:
    return bounds.added(Work.prefill(chunk), Work.decode(_DECODES, _CONTEXT))


def _groups(question: Question) -> Iterator[Group]:
    for parallel, build in question.engines.builds.items():
        chunk = likely_chunk(build.latency, question.slo.tpot)
        yield Group(role="colocated", parallel=parallel, chunk_tokens=chunk)


def _tuned(
    question: Question, best: Group, goodput: float, most: float, simulator: Simulator, log: Log
) -> dict[Group, float]:
    """The group with prompts first, and with smaller and larger chunks until they are no better."""
    first = replace(best, policy="prefill-first", chunk_tokens=WHOLE_PROMPTS)
    chunked, others = {best: goodput}, [first]
    known: dict[Group, float] = {}
    while wave := [*others, *_neighbours(chunked)]:
        answers = _goodputs(question, wave, dict.fromkeys(wave, most), simulator)
        log.wave("colocated", len(wave), 0)
        known |= zip(wave, answers, strict=True)
        chunked |= {group: each for group, each in known.items() if group.policy == "chunked"}
        others = []
    return known


def _neighbours(chunked: dict[Group, float]) -> list[Group]:
    """The best one's next smaller and next larger chunk, where they aren't known."""
    best = max(chunked, key=chunked.__getitem__)
    place = CHUNKS.index(best.chunk_tokens)
    near = [replace(best, chunk_tokens=chunk) for chunk in CHUNKS[max(0, place - 1) : place + 2]]
    return [group for group in near if group not in chunked]


def _goodputs(
    question: Question, wave: Sequence[Group], limits: dict[Group, float], simulator: Simulator
) -> list[float]:
    trials = [
        place_trial(question, Unit((group,)), limits[group], within_node=True) for group in wave
    ]
    return simulator.goodputs(trials)


def _options(question: Question, group: Group, goodput: float) -> Iterator[Option]:
    unit = Unit((group,))
    for copies in range(1, question.cluster.devices // group.devices + 1):
        if packs(question.cluster, unit.times(copies)):
            yield Option(unit, copies, goodput, within_node=True)
