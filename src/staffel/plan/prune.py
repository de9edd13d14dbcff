"""Which instances are worth simulating, given what each can't exceed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

from staffel.plan.candidates import Group
from staffel.plan.question import Log

Goodputs = Callable[[Sequence[Group]], Sequence[float]]


def most_promising(
    limits: Mapping[Group, float],
    goodputs: Goodputs,
    *,
    kind: Callable[[Group], Hashable],
    width: int,
    stage: str,
    log: Log,
) -> dict[Group, float]:
    """Goodputs of all groups but those that can't be the best of their kind, by device.

    Args:
        limits: requests per second that an instance can't exceed; 0 is never simulated.
        kind: groups compete within a kind.
        width: how many are simulated at a time.
    """
    waiting = [group for group, most in limits.items() if most > 0]
    waiting.sort(key=lambda group: -limits[group] / group.devices)
    found: dict[Group, float] = {}
    while waiting:
        wave, waiting = waiting[:width], waiting[width:]
        found |= zip(wave, goodputs(wave), strict=True)
        best = _best(found, kind)
        waiting = [g for g in waiting if limits[g] / g.devices > best.get(kind(g), 0)]
        log.wave(stage, len(wave), len(waiting))
    log.skipped += len(limits) - len(found)
    return found


def _best(found: Mapping[Group, float], kind: Callable[[Group], Hashable]) -> dict[Hashable, float]:
    best: dict[Hashable, float] = {}
    for group, goodput in found.items():
        best[kind(group)] = max(best.get(kind(group), 0), goodput / group.devices)
    return best
