"""One streamed reply, from its bytes to its record.

A chunk of the record is what one read from the socket brought, if that carried content (text,
reasoning, a call of a tool), a token id, a log probability, or a rise of the continuous usage. A
chunk that only names a role, an empty delta, a usage report and a comment are none. Events that
arrive in one read count as one chunk with the sum of their tokens: a user sees them at once, and
a gap of nothing between them would flatter the inter-token latency.
"""

from __future__ import annotations

import asyncio
import errno
import ssl
from time import perf_counter

import msgspec
from msgspec import Struct

from staffel.bench.endpoint import Endpoint
from staffel.bench.exchange import Exchange, connect, tls_context
from staffel.bench.records import Chunk, Record
from staffel.bench.sse import DONE, Event, EventReader, Usage, decode_payload, error_text
from staffel.bench.tokens import Piece, TextTokenizer, count_tokens
from staffel.bench.workload import Ask

_MOST_OF_A_REFUSAL = 16_384
"""Bytes of an answer that is no stream that are kept, for its message."""
_OWN_FAULTS = {errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM}


class OwnFault(Exception):
    """This machine, not the server, could not send the request: out of files, ports or memory."""


class Planned(Struct, frozen=True, array_like=True):
    """A request of the schedule."""

    index: int
    at: float
    """Seconds from the start of the schedule."""
    ask: Ask


class Stream:
    """What was seen of one streamed reply. The sink of its exchange; times are perf_counter's."""

    __slots__ = (
        "_carried",
        "_continuous",
        "_events",
        "_ids",
        "_keep_text",
        "_refusal",
        "_running",
        "_scores",
        "_text",
        "_type",
        "done",
        "error",
        "finish",
        "pieces",
        "status",
        "usage",
    )

    def __init__(self, *, continuous_usage: bool = False, keep_text: bool = False) -> None:
        self._continuous = continuous_usage
        self._keep_text = keep_text
        self._events: EventReader | None = None
        self._refusal = b""
        self._type = ""
        self.status: int | None = None
        self.pieces: list[Piece] = []
        self.usage = Usage()
        self.finish: str | None = None
        self.done = False
        """`[DONE]` came."""
        self.error: str | None = None
        """What the stream itself said or did wrong."""
        self._next_piece()

    def head(self, status: int, content_type: str) -> None:
        self.status, self._type = status, content_type
        if status == 200 and content_type.startswith("text/event-stream"):
            self._events = EventReader()

    def body(self, data: bytes) -> None:
        if self._events is None:
            self._refusal += data[: _MOST_OF_A_REFUSAL - len(self._refusal)]
            return
        for event in self._events.feed(data):
            self._take(event)

    def read(self, at: float) -> None:
        if self._carried:
            counts = self._carried, self._ids, self._scores, self._running
            self.pieces.append(Piece(at, *counts, "".join(self._text)))
            self._next_piece()

    def close(self, at: float) -> None:
        """The connection has ended: whatever is left in the buffer counts."""
        if self._events is not None:
            for event in self._events.close():
                self._take(event)
            self.read(at)

    def expire(self, timeout: float) -> None:
        """It took longer than `timeout` seconds."""
        if not self.done:
            self.error = f"timed out after {timeout:g} s"

    def broken(self, error: OSError) -> None:
        """The connection ended badly: no matter where the stream had ended by itself.

        Raises:
            OwnFault: that was this machine's doing.
        """
        if error.errno in _OWN_FAULTS:
            raise OwnFault(str(error)) from error
        ended = self.done or self.finish is not None or self.error is not None
        if not ended and self.status in (None, 200):
            self.error = f"connection: {error}"

    def fault(self) -> str | None:
        """Why this is no whole and good stream; None: it is one."""
        if self.error is not None:
            return self.error
        if self.status is None:
            return "no answer came"
        if self.status != 200:
            return f"HTTP {self.status}: {error_text(self._refusal)}"
        if self._events is None:
            kind = self._type or "something without a type"
            return f"answered with {kind} in place of a stream: {error_text(self._refusal)}"
        if not self.done and self.finish is None:
            return "truncated: the stream ended without a finish_reason or [DONE]"
        return None if self.pieces else "empty: the stream brought no token"

    def _next_piece(self) -> None:
        self._carried = self._ids = self._scores = self._running = 0
        self._text: list[str] = []

    def _take(self, event: Event) -> None:
        kind, data = event
        if data == DONE:
            self.done = True
            return
        try:
            payload = decode_payload(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._err(error_text(data) if kind == b"error" else f"unreadable event: {error}")
            return
        if payload.failed or kind == b"error":
            self._err(error_text(data))
            return
        before = self.usage.completion_tokens or 0
        if payload.usage is not None:
            self.usage = payload.usage
        for choice in payload.choices:
            text, ids, scores = choice.content(), len(choice.token_ids or ()), choice.scored()
            after = (self.usage.completion_tokens or 0) if self._continuous else before
            if text or ids or scores or after > before:
                self._carried += 1
                self._ids += ids
                self._scores += scores
                if self._continuous:
                    self._running = after
                if self._keep_text:
                    self._text.append(text)
            self.finish = choice.finish_reason or self.finish

    def _err(self, message: str) -> None:
        if self.error is None:
            self.error = f"error in the stream: {message}"


class Client:
    """Sends requests to an endpoint and makes their records. `origin`: perf_counter at time 0."""

    def __init__(self, endpoint: Endpoint, origin: float = 0.0) -> None:
        """Raises ConfigError where the endpoint's tokenizer can't be read."""
        self._endpoint = endpoint
        self._tls: ssl.SSLContext | None = tls_context(endpoint.address)
        folder = endpoint.tokenizer
        self._tokenizer = TextTokenizer(folder) if folder else None
        self.origin = origin
        self.open: dict[int, Stream] = {}
        """What is being followed, by index."""

    def encode(self, planned: Planned) -> bytes:
        """The bytes of a request; made ahead of its time."""
        return self._endpoint.request(planned.ask)

    async def perform(self, planned: Planned, request: bytes) -> Record:
        """Send one request now and follow it to its end, whatever that is.

        A cancellation closes the connection and gives the record of a request that was still
        open (`ended` is None); it isn't raised.

        Raises:
            OwnFault: it could not be sent, and that isn't the server's doing.
        """
        begun = perf_counter()
        stream = Stream(
            continuous_usage=self._endpoint.features.continuous_usage,
            keep_text=self._tokenizer is not None,
        )
        self.open[planned.index] = stream
        exchange = Exchange(request, stream)
        ended: float | None = None
        failure: OSError | None = None
        try:
            async with asyncio.timeout(self._endpoint.timeout) as limit:
                await connect(self._endpoint.address, self._tls, exchange)
                ended = await exchange.ended
        except OSError as error:
            ended, failure = perf_counter(), error
        except asyncio.CancelledError:
            pass
        finally:
            del self.open[planned.index]
        exchange.close(gently=failure is None and ended is not None)
        if ended is not None:
            stream.close(ended)
        if limit.expired():
            stream.expire(self._endpoint.timeout)
        elif failure is not None:
            stream.broken(failure)
        return self._record(planned, exchange.sent or begun, stream, ended)

    def _record(self, planned: Planned, sent: float, stream: Stream, ended: float | None) -> Record:
        usage = stream.usage
        total = usage.completion_tokens
        counts, tokens_from = count_tokens(stream.pieces, total, self._tokenizer)
        details = usage.prompt_tokens_details
        record = Record(
            index=planned.index,
            scheduled=_rounded(planned.at),
            sent=self._time(sent),
            asked_tokens=planned.ask.output_tokens,
            chunks=[
                Chunk(self._time(piece.at), count)
                for piece, count in zip(stream.pieces, counts, strict=True)
            ],
            ended=None if ended is None else self._time(ended),
            prompt_tokens=usage.prompt_tokens,
            output_tokens=total,
            cached_tokens=details.cached_tokens if details else None,
            tokens_from=tokens_from,
            status=stream.status,
            finish=stream.finish,
        )
        if ended is None:
            return record
        return msgspec.structs.replace(record, error=stream.fault() or self._shortcoming(record))

    def _shortcoming(self, record: Record) -> str | None:
        """What is wrong with the length of a stream that ended well."""
        if record.tokens_from == "none":
            return "the server didn't say how many tokens it sent; give --tokenizer FOLDER"
        if not self._endpoint.features.ignore_eos or record.tokens >= record.asked_tokens:
            return None
        retokenised = record.tokens_from == "text" and record.output_tokens is None
        if retokenised and record.finish == "length":
            # The text's own tokenisation may have fewer tokens than the server's.
            return None
        return (
            f"short: {record.tokens} of {record.asked_tokens} tokens, finish {record.finish}; "
            "a server that doesn't honour ignore_eos needs --no-ignore-eos"
        )

    def _time(self, at: float) -> float:
        return _rounded(at - self.origin)


def _rounded(seconds: float) -> float:
    """Microseconds are enough, and keep the files small."""
    return round(seconds, 6)
