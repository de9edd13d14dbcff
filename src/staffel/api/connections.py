"""HTTP connections with limits: on their number, and on the size and the time of a head.

uvicorn's protocol knows none of these. Whoever is in the midst of a request is never cut off; one
that waits, or sends a head bit by bit, gives way when all connections are taken.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import time
from collections import OrderedDict
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from staffel.api.limits import Limits, connections_that_fit

log = logging.getLogger("uvicorn.error")

_SPARE = 16
"""Connections on top of the limit, on which /health and its like are answered still."""

_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Connections:
    """All open connections, and which of them can be done without."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.most = connections_that_fit(limits.max_connections)
        self._open: set[GuardedProtocol] = set()
        self._idle: OrderedDict[GuardedProtocol, None] = OrderedDict()
        """Those without a request, the one that has waited for longest first."""

    @property
    def crowded(self) -> bool:
        """Whether so many are at work on requests that only the spare ones are left."""
        return len(self._open) - len(self._idle) > self.most

    def make_room(self) -> bool:
        """See that one more fits, at the cost of the oldest idle one if need be; False: no room."""
        return len(self._open) < self.most + _SPARE or self.drop_idle()

    def drop_idle(self) -> bool:
        """Close the one that has waited for longest; False: all are at work."""
        if not self._idle:
            return False
        oldest, _ = self._idle.popitem(last=False)
        self._open.discard(oldest)
        if oldest.transport.get_write_buffer_size():
            oldest.transport.close()  # its answer isn't all sent yet
        else:
            oldest.transport.abort()
        return True

    def opened(self, connection: GuardedProtocol) -> None:
        self._open.add(connection)
        self._idle[connection] = None

    def at_work(self, connection: GuardedProtocol) -> None:
        self._idle.pop(connection, None)

    def at_rest(self, connection: GuardedProtocol) -> None:
        if connection in self._open:
            self._idle[connection] = None

    def closed(self, connection: GuardedProtocol) -> None:
        self._open.discard(connection)
        self._idle.pop(connection, None)


class Listener(socket.socket):
    """Takes one connection in each turn of the event loop, and never more than there is room for.

    asyncio takes thousands in one turn, and when the files have run out it logs a traceback for
    each of them.
    """

    connections: Connections

    _taken = False
    _spare = -1

    def accept(self) -> tuple[socket.socket, Any]:
        """Raises BlockingIOError where there is none, or none more in this turn."""
        self._taken = not self._taken
        if not self._taken:
            raise BlockingIOError
        try:
            room = self.connections.make_room()
            connection, address = super().accept()
        except OSError as error:
            self._taken = False
            if error.errno not in _EXHAUSTED:
                raise
            self._refuse_without_files()
            raise BlockingIOError from None
        if room:
            return connection, address
        self._taken = False
        log.warning("a connection was refused: all are taken (--max-connections)")
        with connection:
            connection.setblocking(False)
            with contextlib.suppress(OSError):
                connection.send(_plain(503, "All connections are taken (--max-connections)."))
        raise BlockingIOError

    def _refuse_without_files(self) -> None:
        """No file is left for a connection: close one that can be done without, or this one.

        A connection that stays in the queue would wake the loop up again and again.
        """
        log.warning("a connection was refused: too many files are open")
        if self.connections.drop_idle():
            return
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1
        with contextlib.suppress(OSError):
            super().accept()[0].close()
        self.keep_spare()
        if self._spare < 0:
            time.sleep(0.01)

    def keep_spare(self) -> None:
        """Hold a file that can be given up when there is no other."""
        if self._spare < 0:
            with contextlib.suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY)

    def close(self) -> None:
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1
        super().close()


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's connection, with limits on heads."""

    def __init__(self, *args: Any, connections: Connections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._guard = connections
        self._in_head = True
        self._head_bytes = 0
        self._refused: tuple[int, str] | None = None
        """Status and text, where the head isn't taken."""
        self._head_timer: asyncio.TimerHandle | None = None

    # ---- the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._guard.opened(self)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._guard.closed(self)
        self._stop_head_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > self._guard.limits.max_head_bytes:
            self._refuse_head()

    def send_400_response(self, msg: str) -> None:
        """Called for a head that can't be read, and for one that `on_headers_complete` refused."""
        status, text = self._refused or (400, msg)
        if not self.transport.is_closing():
            self.transport.write(_plain(status, text))
            self.transport.close()

    # ---- what the parser finds

    def on_message_begin(self) -> None:
        # Not with the first byte: some clients end a body with an empty line too many.
        self._start_head_timer()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > self._guard.limits.max_head_bytes:
            self._refused = self._too_large()
            raise ValueError  # the parser stops, and `send_400_response` is called
        self._in_head = False
        self._stop_head_timer()
        self._guard.at_work(self)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if not self.pipeline:
            self._guard.at_rest(self)
        super().on_response_complete()

    # ---- limits

    def _start_head_timer(self) -> None:
        self._stop_head_timer()
        self._head_timer = self.loop.call_later(self._guard.limits.head_timeout, self._head_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_late(self) -> None:
        if not self._answered:  # the next head has time until this one has its answer
            self._start_head_timer()
            return
        most = self._guard.limits.head_timeout
        self._refused = (408, f"The head took longer than {most:g} s (--head-timeout).")
        self._end_head()

    def _refuse_head(self) -> None:
        self._refused = self._too_large()
        self._end_head()

    def _end_head(self) -> None:
        """Answer, where no other answer is under way on this connection."""
        if self._answered and self._head_bytes:
            self.send_400_response("")
        else:
            self.transport.close()

    @property
    def _answered(self) -> bool:
        """Whether no request on this connection waits for its answer's end."""
        return self.cycle is None or self.cycle.response_complete

    def _too_large(self) -> tuple[int, str]:
        most = self._guard.limits.max_head_bytes
        return 431, f"First line and headers are longer than {most} bytes (--max-head)."


def _plain(status: int, text: str) -> bytes:
    """A whole answer for whoever gets no further than its head."""
    body = text.encode("ascii", "replace")
    retry = b"retry-after: 1\r\n" if status == 503 else b""
    return (
        STATUS_LINE[status]
        + b"content-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
        + retry
        + b"content-length: %d\r\n\r\n" % len(body)
        + body
    )
