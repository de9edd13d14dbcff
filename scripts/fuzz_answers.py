"""What fuzz_http.py takes for a right answer, and what for a fault of the server."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fuzz_inputs import Input, Schema

_NO_BODY = (204, 304)
_EXACT = 2**53
"""Up to there all readers of JSON take the same number for the same."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back to one client."""

    data: bytes = b""
    ended: bool = False
    """Whether the server closed the connection; otherwise the client did."""
    late: bool = False
    """Whether the client gave up because it took too long."""
    trouble: str = ""
    """Why there was no connection."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One HTTP response."""

    status: int
    headers: dict[str, str]
    body: bytes
    whole: bool
    """Whether it came to its end."""

    @property
    def content_type(self) -> str:
        return self.headers.get("content-type", "").partition(";")[0]


@dataclass(frozen=True, slots=True)
class Fault:
    kind: str
    """status_5xx, crash, hang, malformed or wrong."""
    what: str


def answers_of(reply: Reply, *, to_head: bool = False) -> list[Answer]:
    """The responses in a reply; those to HEAD have no body. Raises ValueError: it is no HTTP."""
    found: list[Answer] = []
    rest = reply.data
    while rest:
        if not b"HTTP/1.".startswith(rest[:7]):
            raise ValueError(f"no HTTP: {rest[:100]!r}")
        head, blank, rest = rest.partition(b"\r\n\r\n")
        if not blank:
            break
        line, *lines = head.decode("latin-1").split("\r\n")
        status = int(line.split(" ", 2)[1])
        pairs = [line.partition(":")[::2] for line in lines]
        headers = {name.lower(): value.strip() for name, value in pairs}
        if 100 <= status < 200:
            continue
        # What refuses a broken head may not know that it was HEAD's.
        empty = status in _NO_BODY or (to_head and rest[:7] in (b"", b"HTTP/1."))
        body, whole, rest = _body(headers, rest, reply.ended, empty)
        found.append(Answer(status, headers, body, whole))
    return found


def _body(
    headers: dict[str, str], data: bytes, ended: bool, empty: bool
) -> tuple[bytes, bool, bytes]:
    """The body, whether it is whole, and what comes after it."""
    if empty:
        return b"", True, data
    if headers.get("transfer-encoding") == "chunked":
        return _unchunked(data)
    if "content-length" in headers:
        length = int(headers["content-length"])
        return data[:length], len(data) >= length, data[length:]
    return data, ended, b""


def _unchunked(data: bytes) -> tuple[bytes, bool, bytes]:
    body = bytearray()
    while True:
        line, blank, rest = data.partition(b"\r\n")
        if not blank:
            return bytes(body), False, b""
        size = int(line, 16)
        if len(rest) < size + 2:
            return bytes(body + rest[:size]), False, b""
        body += rest[:size]
        data = rest[size + 2 :]
        if size == 0:
            return bytes(body), True, data


# ---- faults


def check(sent: Input, reply: Reply, answers: list[Answer]) -> Iterator[Fault]:
    """All that is wrong with what came back."""
    if reply.trouble:
        yield Fault("malformed", f"no connection: {reply.trouble}")
    elif reply.late:
        yield Fault("hang", f"no end after {reply.seconds:.1f} s: {reply.data[:200]!r}")
    elif reply.ended and not answers and not sent.lenient:
        yield Fault("malformed", f"closed without an answer: {reply.data[:200]!r}")
    for answer in answers:
        yield from _check_answer(sent, reply, answer)


def _check_answer(sent: Input, reply: Reply, answer: Answer) -> Iterator[Fault]:
    if answer.status >= 500 and answer.status != 503:
        yield Fault("status_5xx", f"{answer.status}: {answer.body[:300]!r}")
    if not answer.whole:
        if reply.ended and not sent.lenient:
            yield Fault("malformed", f"an answer breaks off: {answer.body[-200:]!r}")
        return
    try:
        if answer.status != 200:
            _check_refusal(sent, answer)
        elif answer.content_type == "text/event-stream":
            yield from _check_stream(sent, answer)
        elif answer.content_type == "application/json":
            choices = _json(answer.body).get("choices", [])  # other endpoints have none
            yield from _check_texts(sent, _texts(choices))
    except (ValueError, KeyError, TypeError, IndexError) as error:
        yield Fault("malformed", f"{answer.status}, {error!r}: {answer.body[:300]!r}")


def _check_refusal(sent: Input, answer: Answer) -> None:
    """Raises ValueError where it doesn't say what is wrong as OpenAI's errors do."""
    if sent.lenient and (answer.content_type == "text/plain" or not answer.body):
        return
    message = _json(answer.body)["error"]["message"]
    if not (isinstance(message, str) and message):
        raise ValueError("an error without a message")


def _check_stream(sent: Input, answer: Answer) -> Iterator[Fault]:
    *events, end = [event.removeprefix(b"data: ") for event in answer.body.split(b"\n\n")[:-1]]
    if end == b"[DONE]":
        chunks = [_json(event) for event in events]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        yield from _check_texts(sent, _texts(choices))
        return
    error = _json(end)["error"]
    if not error["message"]:
        raise ValueError("an error without a message")
    if isinstance(error["code"], int) and error["code"] >= 500 and error["code"] != 503:
        yield Fault("status_5xx", f"in a stream: {error}")


def _texts(choices: list[dict[str, Any]]) -> dict[int, tuple[str, str | None]]:
    """Text and finish reason by index: of whole choices, or of all that their chunks add up to."""
    found: dict[int, tuple[str, str | None]] = {}
    for choice in choices:
        message = choice.get("message") or choice.get("delta") or choice
        text, reason = found.get(choice["index"], ("", None))
        text += message.get("content") or message.get("text") or ""
        found[choice["index"]] = (text, choice["finish_reason"] or reason)
    return found


def _check_texts(sent: Input, texts: dict[int, tuple[str, str | None]]) -> Iterator[Fault]:
    for text, reason in texts.values():
        if reason not in ("stop", "length"):
            yield Fault("malformed", f"finish_reason {reason!r}")
        elif sent.schema is not None and reason == "stop" and (what := _problem(sent.schema, text)):
            yield Fault("wrong", f"{what}: {text[:300]!r}")


def _problem(schema: Schema, text: str) -> str | None:
    """Why a text doesn't follow a schema, as far as it is easily told."""
    try:
        value = _json(text)
    except ValueError:
        return "no JSON"
    if not isinstance(schema, dict) or not schema.keys() <= {"const", "enum", "$defs"}:
        return None
    if "const" in schema and not same(schema["const"], value):
        return "not the const"
    allowed = schema.get("enum")
    if isinstance(allowed, list) and not any(same(item, value) for item in allowed):
        return "not in the enum"
    return None


def same(a: Any, b: Any) -> bool:
    """Whether two JSON values are equal. Numbers that not every reader can tell apart are."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, int | float) and isinstance(b, int | float):
        return _same_number(a, b)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and a == b


def _same_number(a: int | float, b: int | float) -> bool:
    if abs(a) <= _EXACT and abs(b) <= _EXACT:
        return a == b
    try:
        return math.isclose(a, b, rel_tol=1e-12)
    except OverflowError:
        return False


def _json(text: str | bytes) -> Any:
    """Strictly: without NaN. Raises ValueError."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)
