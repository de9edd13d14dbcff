"""Sends requests on an absolute schedule, in one event loop.

Open loop: a request is sent when its time comes, whatever became of those before; nothing limits
how many are in flight. What a request needs is prepared ahead of its time.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from time import perf_counter, process_time
from typing import Any, TypeAlias

from msgspec import Struct

from staffel.bench.client import Client, OwnFault, Planned
from staffel.bench.endpoint import Endpoint
from staffel.bench.records import Record

_AHEAD = 256
"""Requests whose bytes are ready before their time."""
_SLICE = 0.001
"""Seconds of preparing in one go."""
_TICK = 0.01
"""Seconds between two looks at how far the event loop is behind."""

_Ready: TypeAlias = "asyncio.Queue[tuple[Planned, bytes] | None]"
"""Requests with their bytes; None: there will be no more."""


class Counts(Struct, frozen=True, kw_only=True):
    """Where a run is. `done` are those that ended well; all are requests."""

    sent: int = 0
    in_flight: int = 0
    done: int = 0
    failed: int = 0
    waiting: tuple[int, ...] = ()
    """Of those in flight, by index: those that have no token yet."""

    def __add__(self, other: Counts) -> Counts:
        names = self.__struct_fields__
        return Counts(**{name: getattr(self, name) + getattr(other, name) for name in names})


class Effort(Struct, frozen=True, kw_only=True):
    """How one sender did. Seconds."""

    lateness: list[float]
    """Of each request: its scheduled time to when its connection began to be opened."""
    lags: list[float]
    """How much later than asked for the event loop woke up, every 10 ms: as late may be the
    time stamps of what came meanwhile."""
    cpu: float
    """CPU seconds of the process."""
    faults: list[str]
    """Requests that this machine couldn't send, and why."""


class Sender:
    """Sends what it is given, and tells each request's record at its end. For one run."""

    def __init__(self, endpoint: Endpoint) -> None:
        """Raises ConfigError where the endpoint's tokenizer can't be read."""
        self._client = Client(endpoint)
        self._on_record: Callable[[Record], None]
        self._lateness: list[float] = []
        self._lags: list[float] = []
        self._faults: list[str] = []
        self._open = self._done = self._failed = 0

    @property
    def counts(self) -> Counts:
        return Counts(
            sent=len(self._lateness),
            in_flight=self._open,
            done=self._done,
            failed=self._failed,
            waiting=tuple(i for i, stream in self._client.open.items() if not stream.pieces),
        )

    async def run(
        self,
        plan: AsyncIterator[Planned],
        origin: float,
        on_record: Callable[[Record], None],
        stop: asyncio.Event,
    ) -> Effort:
        """Send the whole plan, and return when the last request has ended.

        `stop` ends it early: nothing more is sent, and what is in flight is closed; each of those
        requests gets its record with `ended` None.

        Args:
            origin: perf_counter at time 0 of the plan. On Linux it is CLOCK_MONOTONIC, which
                processes share.
        """
        raise_file_limit()
        self._client.origin, self._on_record = origin, on_record
        cpu = process_time()
        lag = asyncio.create_task(self._watch_lag())
        sending = asyncio.create_task(self._send_all(plan))
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({sending, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _end(sending, stopping, lag)
        return Effort(
            lateness=self._lateness,
            lags=self._lags,
            cpu=process_time() - cpu,
            faults=self._faults,
        )

    async def _send_all(self, plan: AsyncIterator[Planned]) -> None:
        """Ends when the last request has; a cancellation closes those that are in flight."""
        ready: _Ready = asyncio.Queue(_AHEAD)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._prepare(plan, ready))
            while (item := await ready.get()) is not None:
                await self._until(item[0].at)
                group.create_task(self._follow(*item))

    async def _prepare(self, plan: AsyncIterator[Planned], ready: _Ready) -> None:
        began = perf_counter()
        async for planned in plan:
            await ready.put((planned, self._client.encode(planned)))
            # A full queue makes it wait; until then, what else is due gets its turn.
            if perf_counter() - began > _SLICE:
                await asyncio.sleep(0)
                began = perf_counter()
        await ready.put(None)

    async def _until(self, at: float) -> None:
        due = self._client.origin + at
        while (wait := due - perf_counter()) > 0:
            await asyncio.sleep(wait)

    async def _follow(self, planned: Planned, request: bytes) -> None:
        self._lateness.append(perf_counter() - self._client.origin - planned.at)
        self._open += 1
        try:
            record = await self._client.perform(planned, request)
        except OwnFault as fault:
            self._faults.append(str(fault))
            return
        finally:
            self._open -= 1
        self._done += record.ended is not None and record.error is None
        self._failed += record.error is not None
        self._on_record(record)

    async def _watch_lag(self) -> None:
        due = perf_counter()
        while True:
            due += _TICK
            await asyncio.sleep(max(due - perf_counter(), 0))
            late = perf_counter() - due
            self._lags.append(late)
            # Ticks that were slept through are all late, each by a tick less.
            while late > _TICK:
                late -= _TICK
                due += _TICK
                self._lags.append(late)


def raise_file_limit() -> None:
    """Each stream in flight is an open file; the usual soft limit of 1,024 is below that."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel what still runs, wait for all, and raise what one of them failed with."""
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, BaseExceptionGroup):
            raise outcome.exceptions[0]
        if isinstance(outcome, Exception):
            raise outcome
