"""Requests that share prefixes as the turns of conversations do.

All start with the same block (the system prompt). A request that continues a conversation has a
number of leading blocks in common with an earlier one, nearly always all of that one's but its
last, which was not full. So for each request: its length gives how many blocks it shares, another
draw gives how long ago the earlier one came, and the request next to that point in the past which
has one block more is the one continued. A conversation from before the start counts as new.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import count
from random import Random

from staffel.bench.tables import Sessions, Table
from staffel.bench.workload import Lengths


def conversations(table: Table, seed: int) -> Iterator[Lengths]:
    """Endless requests of a table with sessions, each with the ids of all its blocks."""
    assert table.sessions is not None
    block = table.sessions.block
    rng = Random(f"{table.name}/{seed}")
    past = _Past()
    fresh = count(1)
    for _ in count():
        level, prompt, output = table.draw(rng)
        blocks = -(-prompt // block)
        known = past.find(*_continued(table.sessions, level, blocks, past.size, rng))
        prefix = (*known, *(next(fresh) for _ in range(blocks - len(known))))
        past.add(prefix)
        yield Lengths(prompt, output, prefix, block)


def _continued(
    sessions: Sessions, level: float, blocks: int, past: int, rng: Random
) -> tuple[int, int]:
    """Blocks in common with an earlier request, and about which one that is."""
    shared = round(sessions.shared.at(level, rng.random()))
    lag = round(sessions.lag.at(rng.random()))
    if shared < 2 or lag > past:
        return 1, past
    return min(shared, blocks), past - lag


class _Past:
    """The requests so far, by how many blocks they have."""

    def __init__(self) -> None:
        self.size = 0
        self._prefixes: list[tuple[int, ...]] = []
        self._of_size: dict[int, list[int]] = {}
        self._sizes: list[int] = []

    def add(self, prefix: tuple[int, ...]) -> None:
        if len(prefix) not in self._of_size:
            insort(self._sizes, len(prefix))
        self._of_size.setdefault(len(prefix), []).append(self.size)
        self._prefixes.append(prefix)
        self.size += 1

    def find(self, shared: int, wanted: int) -> tuple[int, ...]:
        """`shared` leading blocks of a request near number `wanted` that has more than those.

        The system prompt's block alone if no request has.
        """
        place = bisect_left(self._sizes, shared + 1)
        if shared < 2 or place == len(self._sizes):
            return (0,)
        numbers = self._of_size[self._sizes[place]]
        return self._prefixes[_nearest(numbers, wanted)][:shared]


def _nearest(numbers: list[int], wanted: int) -> int:
    """The one of the sorted `numbers` that is nearest to `wanted`."""
    place = bisect_left(numbers, wanted)
    around = numbers[max(0, place - 1) : place + 1]
    return min(around, key=lambda number: abs(number - wanted))
