"""Threads for what comes before a request can run: the small doesn't wait for the large."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")

_LARGE_BYTES = 64 << 10
_SMALL_THREADS = 4


class Lanes:
    """Work for its size in bytes: several small pieces at a time, and one large one."""

    def __init__(self) -> None:
        self._small = ThreadPoolExecutor(_SMALL_THREADS, "small")
        self._large = ThreadPoolExecutor(1, "large")

    async def run(self, size: int, work: Callable[[], Result]) -> Result:
        """The result of `work`; where nobody waits any more it isn't begun."""
        lane = self._small if size < _LARGE_BYTES else self._large
        return await asyncio.get_running_loop().run_in_executor(lane, work)

    def close(self) -> None:
        for lane in (self._small, self._large):
            lane.shutdown(wait=False, cancel_futures=True)
