"""Server-sent events as OpenAI's API uses them, from bytes in pieces of any size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw, Struct

DONE = b"[DONE]"


class Event(NamedTuple):
    """One event. `kind` is its `event:` field, and "error" for a line `error: …`."""

    kind: bytes
    data: bytes


class EventReader:
    """Cuts a byte stream into events.

    Lines end in LF or CRLF and may have any length; an event may come in any number of reads, and
    a read may bring any number of events. Comments, `id:` and `retry:` are skipped; several
    `data:` lines of one event are joined by LF.
    """

    def __init__(self) -> None:
        self._partial: list[bytes] = []
        self._kind = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> Iterator[Event]:
        """The events that `data` completes."""
        head, newline, tail = data.rpartition(b"\n")
        if not newline:
            self._partial.append(data)
            return
        if self._partial:
            head = b"".join((*self._partial, head))
        self._partial = [tail] if tail else []
        for line in head.split(b"\n"):
            line = line.removesuffix(b"\r")
            if line:
                self._field(line)
            elif self._data:
                yield self._event()

    def close(self) -> Iterator[Event]:
        """The event that the end of the stream cut short of its empty line, if there is one."""
        yield from self.feed(b"\n\n")

    def _field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
        elif name == b"event":
            self._kind = value
        elif name == b"error":
            # Not in the standard; llama.cpp reports a failure this way.
            self._kind = name
            self._data.append(value)

    def _event(self) -> Event:
        event = Event(self._kind, b"\n".join(self._data))
        self._kind, self._data = b"", []
        return event


class Delta(Struct):
    """What a chunk of a chat adds."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Raw] | None = None


class Logprobs(Struct):
    tokens: list[Raw] | None = None
    """Of completions."""
    content: list[Raw] | None = None
    """Of chat."""


class Choice(Struct):
    """A choice of a completion's chunk (`text`) or of a chat's (`delta`)."""

    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: Logprobs | None = None

    def content(self) -> str:
        """The text that it adds; a call of a tool counts as text."""
        if self.delta is None:
            return self.text or ""
        delta = self.delta
        text = delta.content or delta.reasoning_content or delta.reasoning or ""
        return text or "".join(bytes(call).decode() for call in delta.tool_calls or ())

    def scored(self) -> int:
        """Tokens with a log probability."""
        found = self.logprobs
        return len(found.tokens or found.content or ()) if found is not None else 0


class PromptDetails(Struct):
    cached_tokens: int | None = None


class Usage(Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None


class Payload(Struct):
    """The JSON of one event, as far as it matters here."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None
    object: str | None = None

    @property
    def failed(self) -> bool:
        return self.error is not None or self.object == "error"


decode_payload = msgspec.json.Decoder(Payload).decode


def error_text(body: bytes, limit: int = 300) -> str:
    """The message of an error in any of the usual shapes, else the beginning of the body."""
    try:
        message = _message(msgspec.json.decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError):
        message = body.decode(errors="replace")
    return " ".join(message.split())[:limit]


def _message(value: Any) -> str:
    if not isinstance(value, dict):
        return value if isinstance(value, str) else msgspec.json.encode(value).decode()
    for name in ("error", "message", "detail"):
        if value.get(name):
            return _message(value[name])
    return msgspec.json.encode(value).decode()
