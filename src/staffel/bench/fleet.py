"""Senders in processes of their own, fed from one plan on one clock."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from time import perf_counter

from staffel.bench.client import Planned
from staffel.bench.endpoint import Endpoint
from staffel.bench.records import Record
from staffel.bench.sender import Counts, Effort
from staffel.bench.wire import (
    End,
    Ended,
    FromWorker,
    Ready,
    Send,
    Setup,
    Snapshot,
    Start,
    Stop,
    Summary,
    ToWorker,
    frame,
    from_worker,
    read_frame,
)

LEAD = 0.3
"""Seconds from when all processes are ready to time 0: the first requests get there before."""
_HORIZON = 5.0
"""Seconds that the processes know of the plan ahead: a busy parent makes nothing late."""


class Fleet:
    """A run over several processes: request i of the plan is sent by process i modulo their
    number. All count from one origin, since perf_counter is CLOCK_MONOTONIC on Linux."""

    def __init__(self, processes: int, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._number = processes
        self._workers: list[Process] = []
        self._counts = [Counts()] * processes
        self.origin = 0.0

    @property
    def counts(self) -> Counts:
        """As of a moment ago."""
        return sum(self._counts, Counts())

    async def run(
        self, plan: Iterator[Planned], on_record: Callable[[Record], None], stop: asyncio.Event
    ) -> list[Effort]:
        """As `Sender.run`. Raises RuntimeError where a process dies."""
        async with AsyncExitStack() as stack:
            starting = (stack.enter_async_context(_process()) for _ in range(self._number))
            self._workers = [await worker for worker in starting]
            await self._make_ready()
            self.origin = perf_counter() + LEAD
            self._tell(Start(self.origin))
            return await self._listen(plan, on_record, stop)

    async def _make_ready(self) -> None:
        self._tell(Setup(self._endpoint))
        for worker in self._workers:
            assert isinstance(await _message(worker), Ready)

    async def _listen(
        self, plan: Iterator[Planned], on_record: Callable[[Record], None], stop: asyncio.Event
    ) -> list[Effort]:
        try:
            async with asyncio.TaskGroup() as group:
                feeding = group.create_task(self._feed(plan))
                stopping = group.create_task(self._stop(stop, feeding))
                heard = [
                    group.create_task(self._hear(worker, on_record))
                    for worker in range(len(self._workers))
                ]
                await asyncio.wait(heard)
                feeding.cancel()
                stopping.cancel()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in heard]

    async def _feed(self, plan: Iterator[Planned]) -> None:
        with suppress(ConnectionError):  # a process that died: who listens to it says so
            for planned in plan:
                early = self.origin + planned.at - _HORIZON - perf_counter()
                await asyncio.sleep(max(early, 0))
                stdin = _stdin(self._workers[planned.index % len(self._workers)])
                stdin.write(frame(Send(planned)))
                await stdin.drain()
            self._tell(End())

    async def _stop(self, stop: asyncio.Event, feeding: asyncio.Task[None]) -> None:
        await stop.wait()
        feeding.cancel()
        self._tell(Stop())

    def _tell(self, message: ToWorker) -> None:
        for worker in self._workers:
            _stdin(worker).write(frame(message))

    async def _hear(self, worker: int, on_record: Callable[[Record], None]) -> Effort:
        while True:
            match await _message(self._workers[worker]):
                case Ended(record):
                    on_record(record)
                case Snapshot(counts):
                    self._counts[worker] = counts
                case Summary(counts, effort):
                    self._counts[worker] = counts
                    return effort


@asynccontextmanager
async def _process() -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "staffel.bench.worker", stdin=PIPE, stdout=PIPE
    )
    try:
        yield process
    finally:
        # It has reported, or the run is given up: nothing is lost.
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _message(process: Process) -> FromWorker:
    assert process.stdout is not None
    body = await read_frame(process.stdout)
    if body is None:
        code = await process.wait()
        raise RuntimeError(f"a process of the load generator ended with status {code}")
    return from_worker.decode(body)


def _stdin(process: Process) -> asyncio.StreamWriter:
    assert process.stdin is not None
    return process.stdin
