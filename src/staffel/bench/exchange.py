"""One HTTP request on a connection of its own, with the time of each read."""

from __future__ import annotations

import asyncio
import ssl
from time import perf_counter
from typing import Protocol, cast

import httptools

from staffel.bench.endpoint import Address


class Sink(Protocol):
    """What is told of an answer, in this order. Must not raise."""

    def head(self, status: int, content_type: str) -> None:
        """The status line and the headers are there."""

    def body(self, data: bytes) -> None:
        """A part of the body, freed of its transfer encoding."""

    def read(self, at: float) -> None:
        """All that one read from the socket brought has been told. `at` is of before parsing."""


class Exchange(asyncio.Protocol):
    """Sends the request when connected, and resolves `ended`.

    `ended` is when the answer was whole, or raises OSError where the connection ended before.
    An answer that only the closing of the connection ends counts as whole then.
    """

    def __init__(self, request: bytes, sink: Sink) -> None:
        self._request = request
        self._sink = sink
        self._parser = httptools.HttpResponseParser(self)
        self._type = ""
        self._status = 0
        self._framed = False
        self._transport: asyncio.Transport | None = None
        self.sent: float | None = None
        """When the request's bytes were handed to the socket."""
        self.ended: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)
        self.sent = perf_counter()

    def data_received(self, data: bytes) -> None:
        at = perf_counter()
        if self.ended.done():
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionError(f"the answer is not HTTP/1.1: {error}"))
        self._sink.read(at)

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            self._fail(exc if isinstance(exc, OSError) else ConnectionError(str(exc)))
        elif self._framed or not self._status:
            self._fail(ConnectionError("the server closed the connection before its answer's end"))
        else:
            self._succeed()

    def close(self, *, gently: bool) -> None:
        """Leave the connection; if not `gently`, at once, wherever the answer is."""
        # The parser holds this object: a cycle, and a pause for collecting it later.
        del self._parser
        if self._transport is None:
            return
        if gently:
            self._transport.close()
        else:
            self._transport.abort()

    # Called by the parser.

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-type":
            self._type = value.decode("latin-1").lower()
        elif name in (b"content-length", b"transfer-encoding"):
            self._framed = True

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200:
            self._status = status
            self._sink.head(status, self._type)

    def on_body(self, body: bytes) -> None:
        self._sink.body(body)

    def on_message_complete(self) -> None:
        if self._status:
            self._succeed()

    def _succeed(self) -> None:
        if not self.ended.done():
            self.ended.set_result(perf_counter())

    def _fail(self, error: OSError) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)


async def connect(address: Address, tls: ssl.SSLContext | None, exchange: Exchange) -> None:
    """Open the connection; the exchange sends by itself. Raises OSError where it can't."""
    await asyncio.get_running_loop().create_connection(
        lambda: exchange,
        address.ip or address.host,
        address.port,
        ssl=tls,
        server_hostname=address.host if tls else None,
    )


def tls_context(address: Address) -> ssl.SSLContext | None:
    """The system's certificates, or those of the environment's SSL_CERT_FILE; None for http."""
    return ssl.create_default_context() if address.tls else None
