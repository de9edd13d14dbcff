"""A sender in a process of its own. It ends with its standard input: never after its parent."""

from __future__ import annotations

import asyncio
import gc
import itertools
import signal
import sys
from collections.abc import AsyncIterator, Callable
from typing import TypeAlias

from staffel.bench.client import Planned
from staffel.bench.records import Record
from staffel.bench.sender import Sender
from staffel.bench.wire import (
    End,
    Ended,
    Ready,
    Send,
    Setup,
    Snapshot,
    Start,
    Stop,
    Summary,
    ToWorker,
    frame,
    read_frame,
    to_worker,
)

_SNAPSHOT = 0.2
"""Seconds between two reports of where the worker is."""
_COLLECT_AFTER = 20_000
"""Requests between two runs of the garbage collector. With thousands of streams one takes tens of
milliseconds, in which nothing is sent or read, and left alone it comes every few seconds. What it
would find is asyncio's own cycle in each closed connection, some 2 KB."""

_Plan: TypeAlias = "asyncio.Queue[Planned | None]"


async def _main() -> None:
    reader, writer = await _standard_streams()
    setup = await _next(reader)
    assert isinstance(setup, Setup)
    sender = Sender(setup.endpoint)
    writer.write(frame(Ready()))
    start = await _next(reader)
    assert isinstance(start, Start)
    gc.disable()
    plan: _Plan = asyncio.Queue()
    stop = asyncio.Event()
    beside = [
        asyncio.create_task(_receive(reader, plan, stop)),
        asyncio.create_task(_report(sender, writer)),
    ]
    effort = await sender.run(_planned(plan), start.origin, _teller(writer), stop)
    for task in beside:
        task.cancel()
    writer.write(frame(Summary(sender.counts, effort)))
    while writer.get_write_buffer_size():
        await asyncio.sleep(0.01)


def _teller(writer: asyncio.WriteTransport) -> Callable[[Record], None]:
    told = itertools.count(1)

    def tell(record: Record) -> None:
        writer.write(frame(Ended(record)))
        if next(told) % _COLLECT_AFTER == 0:
            gc.collect()

    return tell


async def _standard_streams() -> tuple[asyncio.StreamReader, asyncio.WriteTransport]:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await loop.connect_read_pipe(lambda: protocol, sys.stdin.buffer)
    transport, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, sys.stdout.buffer)
    return reader, transport


async def _next(reader: asyncio.StreamReader) -> ToWorker | None:
    """The next message; None when the parent is gone."""
    body = await read_frame(reader)
    return None if body is None else to_worker.decode(body)


async def _receive(reader: asyncio.StreamReader, plan: _Plan, stop: asyncio.Event) -> None:
    while (message := await _next(reader)) is not None:
        match message:
            case Send(planned):
                plan.put_nowait(planned)
            case End():
                plan.put_nowait(None)
            case Stop():
                stop.set()
    stop.set()


async def _planned(plan: _Plan) -> AsyncIterator[Planned]:
    while (planned := await plan.get()) is not None:
        yield planned


async def _report(sender: Sender, writer: asyncio.WriteTransport) -> None:
    while True:
        await asyncio.sleep(_SNAPSHOT)
        writer.write(frame(Snapshot(sender.counts)))


def main() -> None:
    # Ctrl-C reaches the whole process group; only the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_main())


if __name__ == "__main__":
    main()
