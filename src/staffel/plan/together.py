"""Prefill and decode instances in all proportions, simulated together where they are promising."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

from staffel.plan.candidates import (
    Unit,
    high_affinity,
    link,
    link_limit,
    low_affinity,
)
from staffel.plan.question import Alone, Log, Option, Question, Rank
from staffel.plan.trials import Simulator, Trial

LARGEST_UNIT = 8
"""Instances simulated together; larger placements are copies of such a unit."""
MOST_UNITS = 6
"""Units simulated together."""
CHOICES = 2
"""Parallelisms of each phase (with low affinity: of each depth) that are combined."""


class Place(NamedTuple):
    """A unit and where its KV goes."""

    unit: Unit
    within_node: bool


class _Estimate(NamedTuple):
    place: Place
    copies: int
    unit_goodput: float
    """As if the phases didn't wait for each other."""


def together(
    question: Question,
    prefill: Sequence[Alone],
    decode: Sequence[Alone],
    simulator: Simulator,
    log: Log,
) -> list[Option]:
    """Placements whose unit was simulated, best first."""
    estimates = sorted(
        _estimates(question, prefill, decode), key=lambda each: _rank(question, each)
    )
    known: dict[Place, float] = {}
    while wave := _next(question, estimates, known, simulator.width):
        trials = [_trial(question, each.place, each.unit_goodput) for each in wave]
        places = [each.place for each in wave]
        known |= zip(places, simulator.goodputs(trials), strict=True)
        log.wave("both phases", len(wave), MOST_UNITS - len(known))
    log.tell("both phases", len(known), 0)
    log.skipped += len({each.place for each in estimates}) - len(known)
    return sorted(
        _options(estimates, known), key=lambda each: question.rank(each.goodput, each.devices)
    )


def _next(
    question: Question, estimates: list[_Estimate], known: dict[Place, float], width: int
) -> list[_Estimate]:
    """The most promising units that aren't known yet and may beat the best one that is."""
    options = _options(estimates, known)
    best = min((question.rank(each.goodput, each.devices) for each in options), default=None)
    wave: dict[Place, _Estimate] = {}
    for each in estimates:
        if len(wave) == min(width, MOST_UNITS - len(known)):
            break
        if best is not None and _rank(question, each) >= best:
            break
        if each.place not in known:
            wave.setdefault(each.place, each)
    return list(wave.values())


def _options(estimates: Sequence[_Estimate], known: dict[Place, float]) -> list[Option]:
    return [
        Option(each.place.unit, each.copies, known[each.place], each.place.within_node)
        for each in estimates
        if known.get(each.place)
    ]


def _rank(question: Question, each: _Estimate) -> Rank:
    goodput = each.copies * each.unit_goodput
    return question.rank(goodput, each.copies * each.place.unit.devices)


def _estimates(
    question: Question, prefill: Sequence[Alone], decode: Sequence[Alone]
) -> Iterator[_Estimate]:
    cluster = question.cluster
    near = cluster.nodes == 1
    if question.affinity != "low" or near:
        for one, other in product(prefill[:CHOICES], decode[:CHOICES]):
            for unit, copies in high_affinity(cluster, one.group, other.group, LARGEST_UNIT):
                yield _estimate(question, Place(unit, near), copies, one, other)
    if question.affinity != "high" and not near:
        for one, other in _same_depth(prefill, decode):
            for unit, copies in low_affinity(cluster, one.group, other.group, LARGEST_UNIT):
                yield _estimate(question, Place(unit, True), copies, one, other)


def _same_depth(prefill: Sequence[Alone], decode: Sequence[Alone]) -> Iterator[tuple[Alone, Alone]]:
    for depth in sorted({alone.group.parallel.pp for alone in prefill}):
        ones = [alone for alone in prefill if alone.group.parallel.pp == depth]
        others = [alone for alone in decode if alone.group.parallel.pp == depth]
        yield from product(ones[:CHOICES], others[:CHOICES])


def _estimate(
    question: Question, place: Place, copies: int, prefill: Alone, decode: Alone
) -> _Estimate:
    """The slowest of prefill, handoff and decode."""
    n, m = (group.count for group in place.unit.groups)
    handoffs = link_limit(
        question.cluster,
        place.unit,
        question.kv_bytes_per_request,
        within_node=place.within_node,
    )
    return _Estimate(place, copies, min(n * prefill.goodput, m * decode.goodput, handoffs))


def _trial(question: Question, place: Place, high: float) -> Trial:
    return place_trial(question, place.unit, high, within_node=place.within_node)


def place_trial(question: Question, unit: Unit, high: float, *, within_node: bool) -> Trial:
    """The unit under the whole SLO."""
    kv, cluster = question.engines.kv_bytes_per_token, question.cluster
    apart = None if unit.colocated else link(cluster, unit, kv, within_node=within_node)
    return Trial(
        instances=question.engines.instances(unit), link=apart, slo=question.slo, high=high
    )
