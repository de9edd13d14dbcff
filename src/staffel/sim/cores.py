"""Whose cores server and clients use, where they have none of their own.

As Linux has it: whoever wakes up goes to an idle core. Where there is none, it stays where it last
was, and the scheduler's balancing has brought it to the core that has least to do; so an instance
that is idle now and then pays more than one that never is. Seen in the scheduler's switches on two
cores with `staffel serve`, of the time that was taken while both instances were at work: a prefill
instance gave 72 % where it was idle for 52 % of the time and the decode instance for 14 %, and half
of it where they were for 16 and 5 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from typing import Protocol

MEMORY_NS = 5 * 10**8
"""Time after which what an instance did counts for 1/e."""
LEAST = 0.1
"""What an instance weighs that is never idle; one that always is weighs 1 more."""


class Idleness:
    """Which share of its recent time an instance was idle."""

    def __init__(self) -> None:
        self._share = 1.0
        self._since = 0
        self._idle = True

    def note(self, now: int, *, idle: bool) -> None:
        """What it is from now on."""
        if idle == self._idle:
            return
        self._share, self._since, self._idle = self.share(now), now, idle

    def share(self, now: int) -> float:
        kept = exp((self._since - now) / MEMORY_NS)
        return self._idle + (self._share - self._idle) * kept


class Lender(Protocol):
    """An instance, as far as its cores are concerned."""

    @property
    def working(self) -> bool: ...

    def idleness(self, now: int) -> float: ...

    def give(self, seconds: float) -> None: ...


def take(seconds: float, instances: Sequence[Lender], now: int) -> None:
    """Somebody else needs a core for so long: an idle instance's, at nobody's cost; where all are
    at work, each gives its part."""
    if not all(instance.working for instance in instances):
        return
    weights = [LEAST + instance.idleness(now) for instance in instances]
    whole = seconds / sum(weights)
    for instance, weight in zip(instances, weights, strict=True):
        instance.give(whole * weight)
