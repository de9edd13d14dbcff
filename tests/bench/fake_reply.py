"""What the fake server says: its behaviours, and the events and bytes that they make."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal


@dataclass(frozen=True)
class Behaviour:
    """How a request is answered. The default is a good server: one token per chunk, usage."""

    prefill: float = 0.0
    """Seconds of the prefill queue per request."""
    prefill_token: float = 0.0
    """More seconds per prompt token."""
    tpot: float = 0.005
    tokens: int | None = None
    """Output tokens; None: as asked."""
    chunk_tokens: int = 1
    role_chunk: bool = True
    """Chat only: the first chunk names the role, at once when the request arrives."""
    empty_delta: bool = False
    """A chunk with an empty text at once when the request arrives."""
    usage: Literal["none", "final", "continuous"] = "continuous"
    """The most that is told; only what is asked for is told."""
    token_ids: bool = False
    """Whether return_token_ids has an effect."""
    logprobs: bool = False
    finish: str | None = "length"
    done: bool = True
    status: int = 200
    message: str = "refused"
    headers: str = ""
    refuses: tuple[str, ...] = ()
    """Fields that get a 400 which names them."""
    json_answer: bool = False
    error_at: int | None = None
    """An error event in place of this chunk; the stream ends there."""
    cut_at: int | None = None
    """The connection is closed in place of this chunk."""
    reset_at: int | None = None
    """The connection is reset in place of this chunk."""
    stall_at: int | None = None
    """Nothing more comes from this chunk on."""
    newline: str = "\n"
    comment: bool = False
    """A keep-alive comment before each chunk."""
    padding: int = 0
    """More bytes in each chunk's line."""
    split: int | None = None
    """Bytes per write, each with a pause: events are split across reads."""
    chunked: bool = True
    """Transfer encoding; else the end of the connection ends the answer."""
    word: str = " tok"
    burst: bool = False
    """All chunks in one write when the last is due."""


class Reply:
    """The events of one reply, as JSON."""

    def __init__(self, behaviour: Behaviour, body: dict[str, Any], chat: bool) -> None:
        self._behaviour = behaviour
        self._chat = chat
        asked = body.get("max_tokens") or body["max_completion_tokens"]
        self._tokens = asked if behaviour.tokens is None else behaviour.tokens
        options = body.get("stream_options", {})
        self._usage_asked = behaviour.usage != "none" and options.get("include_usage")
        self._continuous = behaviour.usage == "continuous" and options.get("continuous_usage_stats")
        self._ids = behaviour.token_ids and body.get("return_token_ids")
        self._prompt_tokens = len(body.get("prompt") or body["messages"][0]["content"])
        size = behaviour.chunk_tokens
        self._counts = [min(size, self._tokens - done) for done in range(0, self._tokens, size)]
        self._sums = list(accumulate(self._counts))

    def offsets(self) -> list[int]:
        """Of each chunk, its last token's index: then it is due."""
        return [0, *(done - 1 for done in self._sums[1:])] if self._sums else []

    def opening(self) -> Iterator[str]:
        if self._chat and self._behaviour.role_chunk:
            yield self._event({"delta": {"role": "assistant", "content": ""}}, 0)
        if self._behaviour.empty_delta:
            yield self._event(self._content(""), 0)

    def chunk(self, index: int) -> str:
        count = self._counts[index]
        choice = self._content(self._behaviour.word * count)
        if self._ids:
            choice["token_ids"] = list(range(count))
        if self._behaviour.logprobs:
            choice["logprobs"] = {"tokens": ["x"] * count, "token_logprobs": [0.0] * count}
        return self._event(choice, self._sums[index])

    def closing(self) -> Iterator[str]:
        if self._behaviour.finish:
            last = {**self._content(""), "finish_reason": self._behaviour.finish}
            yield self._event(last, self._tokens)
        if self._usage_asked:
            yield json.dumps({"choices": [], "usage": self._usage(self._tokens)})
        if self._behaviour.done:
            yield "[DONE]"

    def _content(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}} if self._chat else {"text": text}

    def _event(self, choice: dict[str, Any], tokens: int) -> str:
        payload: dict[str, Any] = {
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "choices": [{"index": 0, "finish_reason": None, **choice}],
        }
        if self._continuous:
            payload["usage"] = self._usage(tokens)
        if self._behaviour.padding:
            payload["padding"] = "x" * self._behaviour.padding
        return json.dumps(payload)

    def _usage(self, tokens: int) -> dict[str, Any]:
        return {"prompt_tokens": self._prompt_tokens, "completion_tokens": tokens}


class Writer:
    """Events as bytes of an HTTP answer."""

    def __init__(self, transport: Any, behaviour: Behaviour) -> None:
        self._transport = transport
        self._behaviour = behaviour
        self._held = b""

    def head(self) -> None:
        encoding = "Transfer-Encoding: chunked\r\n" if self._behaviour.chunked else ""
        text = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
        self._transport.write(f"{text}{encoding}{self._behaviour.headers}\r\n".encode())

    def event(self, data: str) -> None:
        line = self._behaviour.newline
        comment = f": keep-alive{line}{line}" if self._behaviour.comment else ""
        self._write(f"{comment}data: {data}{line}{line}".encode())

    def end(self) -> None:
        if self._behaviour.chunked:
            self._held += b"0\r\n\r\n"
        self._flush()
        if self._behaviour.split is None:
            self._transport.close()

    def _write(self, data: bytes) -> None:
        if self._behaviour.chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        self._held += data
        if not self._behaviour.burst and self._behaviour.split is None:
            self._flush()

    def _flush(self) -> None:
        if self._behaviour.split is None:
            self._transport.write(self._held)
            self._held = b""
        else:
            self._pieces(self._behaviour.split)

    def _pieces(self, size: int) -> None:
        """One piece a millisecond, so that each comes in a read of its own."""
        if not self._held:
            self._transport.close()
            return
        piece, self._held = self._held[:size], self._held[size:]
        self._transport.write(piece)
        asyncio.get_running_loop().call_later(0.001, self._pieces, size)
