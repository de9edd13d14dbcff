"""A virtual clock: what happens when, in integer nanoseconds."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Clock:
    """Runs actions in order of time; those of one moment in the order in which they were set."""

    def __init__(self) -> None:
        self.now = 0
        self._heap: list[tuple[int, int, Callable[[Any], None], Any]] = []
        self._set = 0
        self._stopped = False

    @property
    def pending(self) -> int:
        """Actions that are still to come."""
        return len(self._heap)

    def at(self, time: int, action: Callable[[Any], None], argument: Any = None) -> None:
        """Do `action(argument)` at that time."""
        self._set += 1
        heappush(self._heap, (time, self._set, action, argument))

    def stop(self) -> None:
        """Nothing more happens."""
        self._stopped = True

    def run(self) -> None:
        """Until nothing is left to do, or `stop`."""
        while self._heap and not self._stopped:
            self.now, _, action, argument = heappop(self._heap)
            action(argument)
