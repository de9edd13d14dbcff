"""Answers that give up as soon as the client is gone, in one go or as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from staffel.api.errors import ApiError
from staffel.api.record import CLIENT_LEFT, Record

Result = TypeVar("Result")


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """What `work` returns; it is cancelled the moment the client closes the connection.

    The server only tells of a closed connection to somebody who listens, so this does.

    Raises:
        ClientDisconnect: the client has left.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_closed(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        leaving.cancel()
        working.cancel()
        # Also lets the work's own clean-up run before anybody goes on.
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _closed(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events: one `data:` line of JSON per chunk, then `[DONE]`.

    The status waits for the first chunk, so that a request that fails before it gets a proper
    error; one that fails later gets an error event, and the stream closes.
    """

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncGenerator[dict[str, Any]], record: Record) -> None:
        self._chunks = chunks
        self._record = record
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        # The base class measures its (empty) body.
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._run(scope, receive, send))
        except ClientDisconnect:
            self._record.status = CLIENT_LEFT

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        try:
            async with aclosing(self._chunks) as chunks:
                async for chunk in chunks:
                    if not started:
                        started = True
                        await self._start(send)
                    await _send_event(send, msgspec.json.encode(chunk))
        except ApiError as error:
            if not started:
                await error.response()(scope, receive, send)
                return
            self._record.status = error.status
            await _send_event(send, msgspec.json.encode(error.body()))
        else:
            await _send_event(send, b"[DONE]")
        await send({"type": "http.response.body", "body": b""})

    async def _start(self, send: Send) -> None:
        head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(head)


async def _send_event(send: Send, data: bytes) -> None:
    body = b"data: " + data + b"\n\n"
    await send({"type": "http.response.body", "body": body, "more_body": True})
