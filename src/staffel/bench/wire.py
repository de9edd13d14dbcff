"""What a run's parent and its senders say to each other.

Both directions are frames on the standard streams: four bytes of length, then msgpack.
"""

from __future__ import annotations

import asyncio

import msgspec
from msgspec import Struct

from staffel.bench.client import Planned
from staffel.bench.endpoint import Endpoint
from staffel.bench.records import Record
from staffel.bench.sender import Counts, Effort


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
