"""A sender in a process of its own: messages and the process's life.

Both directions are frames on the standard streams: four bytes of length, then msgpack. The worker
ends when its standard input does, so it never outlives its parent.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
from collections.abc import AsyncIterator
from typing import TypeAlias

import msgspec
from msgspec import Struct

from staffel.bench.client import Planned
from staffel.bench.endpoint import Endpoint
from staffel.bench.records import Record
from staffel.bench.sender import Counts, Effort, Sender

_SNAPSHOT = 0.2
"""Seconds between two reports of where the worker is."""


class Setup(Struct, frozen=True, tag=True):
    endpoint: Endpoint


class Start(Struct, frozen=True, tag=True):
    origin: float
    """perf_counter at time 0 of the plan."""


class Send(Struct, frozen=True, tag=True):
    planned: Planned


class End(Struct, frozen=True, tag=True):
    """Nothing more will be planned."""


class Stop(Struct, frozen=True, tag=True):
    """Close what is in flight and report."""


class Ready(Struct, frozen=True, tag=True):
    """The worker is loaded."""


class Ended(Struct, frozen=True, tag=True):
    record: Record


class Snapshot(Struct, frozen=True, tag=True):
    counts: Counts


class Summary(Struct, frozen=True, tag=True):
    """The last message."""

    counts: Counts
    effort: Effort


ToWorker = Setup | Start | Send | End | Stop
FromWorker = Ready | Ended | Snapshot | Summary

_Plan: TypeAlias = "asyncio.Queue[Planned | None]"

_encoder = msgspec.msgpack.Encoder()
to_worker = msgspec.msgpack.Decoder(ToWorker)
from_worker = msgspec.msgpack.Decoder(FromWorker)


def frame(message: ToWorker | FromWorker) -> bytes:
    body = _encoder.encode(message)
    return len(body).to_bytes(4, "little") + body


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """The next message's bytes; None at the end of the stream."""
    try:
        return await reader.readexactly(int.from_bytes(await reader.readexactly(4), "little"))
    except asyncio.IncompleteReadError:
        return None


async def _main() -> None:
    reader, writer = await _standard_streams()
    setup = await _next(reader)
    assert isinstance(setup, Setup)
    sender = Sender(setup.endpoint)
    writer.write(frame(Ready()))
    start = await _next(reader)
    assert isinstance(start, Start)
    # What has been loaded never dies: the collector needn't look at it in the middle of a run.
    gc.freeze()
    plan: _Plan = asyncio.Queue()
    stop = asyncio.Event()
    beside = [
        asyncio.create_task(_receive(reader, plan, stop)),
        asyncio.create_task(_report(sender, writer)),
    ]
    effort = await sender.run(
        _planned(plan), start.origin, lambda record: writer.write(frame(Ended(record))), stop
    )
    for task in beside:
        task.cancel()
    writer.write(frame(Summary(sender.counts, effort)))
    while writer.get_write_buffer_size():
        await asyncio.sleep(0.01)


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


if __name__ == "__main__":
    # Ctrl-C reaches the whole process group; only the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_main())
