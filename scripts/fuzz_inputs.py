"""The inputs of fuzz_http.py: what is sent, and when the client leaves. No network here.

Input number i depends on the seed and on i alone, so that any of them can be made again.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from typing import Any

from fuzz_schemas import EDGES, ODD_TEXTS, SPECIAL, Schema, chance, whole_schema

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
GENERATING = (COMPLETIONS, CHAT)
VOCABULARY = 49152
"""Of the default model."""
SHARES = {"schema": 40, "body": 34, "head": 22, "leaver": 4}
"""Per cent of the inputs."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """The client closes after so many bytes of the answer, or after so many seconds."""

    bytes: float = math.inf
    seconds: float = 0.05
    reset: bool = False
    """Whether it closes as a process does that dies with unread data."""


@dataclass(frozen=True, slots=True)
class Input:
    """One client."""

    number: int
    kind: str
    data: bytes
    leaving: Leaving | None = None
    """None: it stays until the end of the answer."""
    lenient: bool = False
    """The head itself may be broken: plain text or a closed connection is an answer too."""
    schema: Schema = None
    """What a whole answer must follow; None: any text will do."""


def make_input(seed: int, number: int) -> Input:
    draw = random.Random(f"{seed}/{number}")
    [kind] = draw.choices(list(SHARES), list(SHARES.values()))
    return _MAKERS[kind](draw, number)


# ---- well-formed requests


def post(path: str, body: bytes, *headers: str) -> bytes:
    """A request after whose answer the server closes the connection."""
    head = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
        *headers,
    ]
    return "\r\n".join([*head, "", ""]).encode() + body


def encoded(draw: random.Random, body: Any) -> bytes:
    """With characters as they are, where JSON can have them so, or all escaped."""
    try:
        return json.dumps(body, ensure_ascii=chance(draw, 0.5)).encode()
    except UnicodeEncodeError:
        return json.dumps(body).encode()


def _prompt_field(draw: random.Random, path: str) -> dict[str, Any]:
    text = draw.choice(["a", "Hello", "The colour is", "1 2 3", draw.choice(ODD_TEXTS[:20])])
    if path == CHAT:
        return {"messages": [{"role": "user", "content": text}]}
    ids = [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 8))]
    return {"prompt": draw.choice([text] * 6 + [[text, "b"], ids, [ids, [1]]])}


_SAMPLING: dict[str, list[Any]] = {
    "temperature": [0, 0.1, 0.7, 1, 1.5, 2, 5e-324],
    "top_p": [1, 0.9, 0.1, 1e-9, 5e-324],
    "top_k": [0, -1, 1, 20, 2**31 - 1],
    "min_p": [0, 0.1, 1, 5e-324],
    "seed": [0, 1, -1, 2**63 - 1, -(2**63)],
    "n": [1, 1, 2, 3],
    "presence_penalty": [0, 2, -2, 0.5],
    "frequency_penalty": [0, 2, -2, 0.5],
    "repetition_penalty": [1, 1.1, 0.5, 1e-300, 5e-324, 1e308],
    "stop": ["a", ["\n", " the"], [], "<|im_end|>", ["x" * 1000]],
    "stop_token_ids": [[], [0], [1, 2, 3], [VOCABULARY - 1]],
    "logit_bias": [{}, {"0": -100}, {"5": 100}, {str(i): -100 for i in range(300)}],
    "ignore_eos": [True, False],
    "min_tokens": [0, 1],
    "response_format": [{"type": "text"}, {"type": "json_object"}],
    "return_token_ids": [True],
    "user": ["somebody", 5],
}
_COMPLETION_ONLY: dict[str, list[Any]] = {"logprobs": [0, 1, 5, 20], "echo": [True]}
_CHAT_ONLY: dict[str, list[Any]] = {
    "logprobs": [True, False],
    "add_generation_prompt": [False],
    "chat_template_kwargs": [{"a": 1}, {"messages": []}, {"tools": None, "bos_token": "x"}],
}


def valid_body(draw: random.Random, path: str) -> dict[str, Any]:
    """A small one that asks for few tokens."""
    if path == TOKENIZE:
        source = _prompt_field(draw, CHAT) if chance(draw, 0.5) else {"prompt": "Hello"}
        return source | ({"return_token_strs": True} if chance(draw, 0.5) else {})
    if path == DETOKENIZE:
        return {"tokens": [draw.randrange(VOCABULARY) for _ in range(draw.randint(0, 50))]}
    body = _prompt_field(draw, path) | {"max_tokens": _few(draw)}
    fields = _SAMPLING | (_CHAT_ONLY if path == CHAT else _COMPLETION_ONLY)
    for name in draw.sample(list(fields), draw.choice([0, 1, 2, 4, 8])):
        body[name] = draw.choice(fields[name])
    return body | _streaming(draw)


def _few(draw: random.Random) -> int:
    """Mostly one, which is cheap: a run has thousands of these."""
    return 1 if chance(draw, 0.85) else draw.choice([2, 3, 4, 8, 16])


def _streaming(draw: random.Random) -> dict[str, Any]:
    if chance(draw, 0.6):
        return {}
    options = [None, {}, {"include_usage": True}, {"continuous_usage_stats": True}]
    return {"stream": True, "stream_options": draw.choice(options)}


# ---- schemas


def _schema_input(draw: random.Random, number: int) -> Input:
    path = CHAT if chance(draw, 0.25) else COMPLETIONS  # a chat's prompt is longer
    schema = whole_schema(draw)
    wanted = {"type": "json_schema", "json_schema": {"schema": schema}}
    if chance(draw, 0.02):
        wanted, schema = {"type": "json_object"}, {"type": "object"}
    body = _prompt_field(draw, path) | {
        "max_tokens": _few(draw),
        "temperature": draw.choice([0, 0, 1, 2]),
        "response_format": wanted,
        **_streaming(draw),
    }
    if chance(draw, 0.05):
        body["n"] = 2
    return Input(number, "schema", post(path, encoded(draw, body)), schema=schema)


# ---- bodies


_HOSTILE: list[Any] = [
    *EDGES, -1, 0, 1.5, 5e-324, 1e308, -1e308, math.nan, math.inf, "", "1", "a", True, False, None,
    [], {}, [[]], [{}], {"a": {}}, [None], [1, "a"], ["a", ["b"]], [1.5], [-1], [VOCABULARY],
    [2**31], [2**70], [[1], [VOCABULARY]], *SPECIAL, *ODD_TEXTS, {"type": "text", "text": 1},
    [{"role": "user", "content": [{"type": "image_url"}]}], [{"role": "system", "content": "a"}],
    [{"role": "assistant", "content": "a"}], [{"role": "user", "content": "a", "name": 1}],
    {"json_schema": {"schema": {}}, "type": "json_schema"}, {"include_usage": 1},
]  # fmt: skip
_UNKNOWN = ["tools", "best_of", "suffix", "functions", "", "__proto__", "Max_Tokens", "é", "\x00"]


def _body_input(draw: random.Random, number: int) -> Input:
    path = draw.choice([COMPLETIONS, CHAT, COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE])
    body = valid_body(draw, path)
    kind = draw.random()
    if kind < 0.15:
        data = encoded(draw, body)
    elif kind < 0.55:
        data = encoded(draw, _mutated(draw, body))
    elif kind < 0.97:
        data = _damaged(draw, encoded(draw, body))
    else:
        data = _huge(draw, path, body)
    return Input(number, "body", post(path, data))


def _mutated(draw: random.Random, body: dict[str, Any]) -> dict[str, Any]:
    """With a wrong value here and there."""
    body = dict(body)
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        kind = draw.randrange(5)
        if kind == 0:
            body[draw.choice(_UNKNOWN)] = draw.choice(_HOSTILE)
        elif kind == 1 and body:
            del body[draw.choice(list(body))]
        elif kind == 2:
            body[draw.choice(list(_SAMPLING))] = draw.choice(_HOSTILE)
        else:
            body[draw.choice(list(body) or ["prompt"])] = draw.choice(_HOSTILE)
    _keep_cheap(body)
    return body


def _keep_cheap(body: dict[str, Any]) -> None:
    """By default an answer may take all of the context, and with it longer than any bound."""
    if "messages" in body or "prompt" in body:
        body.setdefault("max_tokens", 1)
        if body["max_tokens"] is None or body.get("max_completion_tokens", 1) is None:
            body["max_tokens"] = 1


def _damaged(draw: random.Random, data: bytes) -> bytes:
    """With some bytes different, more, or fewer."""
    damaged = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 5])):
        place = draw.randrange(len(damaged) + 1)
        kind = draw.randrange(6)
        if kind == 0 and place < len(damaged):
            damaged[place] ^= 1 << draw.randrange(8)
        elif kind == 1:
            damaged[place:place] = draw.randbytes(draw.randint(1, 4))
        elif kind == 2:
            del damaged[place : place + draw.randint(1, 8)]
        elif kind == 3:
            damaged[place:place] = draw.choice(_FRAGMENTS)
        elif kind == 4:
            del damaged[place:]
        else:
            damaged[place:place] = damaged[: draw.randint(0, 40)]
    return bytes(damaged)


_FRAGMENTS = [
    b"\xff\xfe", b"\xc0\x80", b"\xed\xa0\x80", b"\x00", b"\\ud83d", b"NaN", b"-Infinity", b"1e999",
    b"9" * 400, b"0" * 5000, b",", b"}", b"{", b"[[[[", b'"', b'"max_tokens":2,"max_tokens":1,',
    b"\xef\xbb\xbf", b"//", b"-", b"1.", b'\\u0000', b"null",
]  # fmt: skip


def _huge(draw: random.Random, path: str, body: dict[str, Any]) -> bytes:
    """Long or deep, or asking for much."""
    field = {CHAT: "messages", DETOKENIZE: "tokens"}.get(path, "prompt")
    size = draw.choice([1000, 10_000, 100_000])
    kind = draw.randrange(8)
    if kind == 0:
        opening, closing = draw.choice([(b"[", b"]"), (b'{"a":', b"}")])
        return b'{"%b":' % field.encode() + opening * size + b"1" + closing * size + b"}"
    if kind == 1:
        return encoded(draw, body | {field: [draw.choice(_HOSTILE)] * (size // 10)})
    if kind == 2:
        return encoded(draw, body | {f"field{i}": i for i in range(size // 10)})
    if kind == 3 and path == COMPLETIONS:
        choices = draw.choice([40, 40, 2000, 100_000])
        n = draw.choice([1, 4, 128])
        return encoded(draw, {"prompt": ["a"] * (choices // n or 1), "n": n, "max_tokens": 1})
    if kind == 4:
        return encoded(draw, body | {"stop": ["x" * 1000] * (size // 400), "user": "x" * size})
    if kind == 5:
        return encoded(draw, body | {"logit_bias": {str(i): 1 for i in range(size // 50)}})
    text = draw.choice(["x", "word ", "\n", "漢", "<|im_end|>", "\x00", "a\u0301"]) * size
    text = text[:size]
    value = [{"role": "user", "content": text}] if path == CHAT else text
    return encoded(draw, {field: value, "max_tokens": 1})


# ---- heads


def _head_input(draw: random.Random, number: int) -> Input:
    make = draw.choice(
        [_odd_request, _odd_request, _odd_framing, _chunked, _pipelined, _cut, _noise]
    )
    data, complete = make(draw)
    leaving = None if complete else Leaving(seconds=draw.choice([0, 0.01, 0.05]))
    if leaving and chance(draw, 0.2):
        leaving = Leaving(seconds=leaving.seconds, reset=True)
    return Input(number, "head", data, leaving, lenient=True)


_METHODS = ["GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "FOO", "get", ""]
_PATHS = [
    "/health", "/ready", "/v1/models", "/v1/models/x", "/v1/models/..%2f", "/", "*", "", "//", "/%",
    "/%00", "/%ff", "/health?" + "a=b&" * 50, "/health/", "/../etc/passwd", "http://localhost/health",
    "/v1/completions", "/" + "x" * 5000, "/\u00e9", "/a b", "/v1/chat/completions#a", "/metrics",
]  # fmt: skip
_VERSIONS = ["HTTP/1.1"] * 8 + ["HTTP/1.0", "HTTP/2.0", "HTTP/0.9", "http/1.1", "", "HTTP/1.1.1"]
_HEADERS = [
    "X-Request-Id: abc", "X-Request-Id: a b", "X-Request-Id: " + "x" * 200, "X-Request-Id: \u00e9",
    "Authorization: Bearer x", "Authorization: \x00", "Expect: 100-continue", "Expect: nothing",
    "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==", "Upgrade: h2c", "Connection: keep-alive",
    "Accept-Encoding: gzip", "Content-Encoding: gzip", "Content-Type: text/plain", "Cookie: a=b",
    "No colon", ": no name", "Name : space", " folded: yes", "A\x00b: c", "X: \x7f",
    "Host: a\r\nHost: b", "X-Forwarded-For: 1.2.3.4", "Transfer-Encoding: gzip", "Origin: null",
    "Content-Type: application/json; charset=x", "Range: bytes=0-", "X: " + "y" * 20_000,
]  # fmt: skip
_LENGTHS = [
    "-1", "+5", "0", "1", "5, 6", "abc", "", " ", "0x10", "1e3", "99999999999999999999999", "5\r\n"
    "Content-Length: 6", "9000000", str(2**63), "007",
]  # fmt: skip
_SMALL = b'{"prompt":"a","max_tokens":1}'


def _odd_request(draw: random.Random) -> tuple[bytes, bool]:
    """Any method, path, version and headers."""
    line = f"{draw.choice(_METHODS)} {draw.choice(_PATHS)} {draw.choice(_VERSIONS)}"
    headers = draw.sample(_HEADERS, draw.choice([0, 1, 1, 2, 5]))
    if chance(draw, 0.03):
        headers.append("\r\n".join(f"H{i}: {'v' * 50}" for i in range(draw.choice([100, 3000]))))
    ending = "\n" if chance(draw, 0.1) else "\r\n"
    text = ending.join([line, "Host: localhost", *headers, "Connection: close", "", ""])
    return text.encode("utf-8" if chance(draw, 0.5) else "latin-1", "replace"), False


def _odd_framing(draw: random.Random) -> tuple[bytes, bool]:
    """A body whose length is not what the head says."""
    length = draw.choice([*_LENGTHS, str(len(_SMALL) - 3), str(len(_SMALL) + 3), None])
    framing = "" if length is None else f"Content-Length: {length}\r\n"
    if chance(draw, 0.2):
        framing += "Transfer-Encoding: chunked\r\n"
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\n{framing}Connection: close\r\n\r\n"
    return head.encode() + _SMALL, False


def _chunked(draw: random.Random) -> tuple[bytes, bool]:
    """A body in chunks, right or wrong."""
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
    head += draw.choice(["Transfer-Encoding: chunked", "transfer-encoding:CHUNKED"]) + "\r\n\r\n"
    size = draw.choice([1, 5, 100])
    parts = [_SMALL[start : start + size] for start in range(0, len(_SMALL), size)]
    chunks = [b"%x\r\n%b\r\n" % (len(part), part) for part in parts]
    whole = head.encode() + b"".join(chunks) + b"0\r\n\r\n"
    if chance(draw, 0.4):
        return whole, True
    wrong = [
        b"g\r\n",
        b"-1\r\nx\r\n",
        b"fffffffffffffffff\r\n",
        b"5;a=b\r\nab",
        b"\r\n\r\n",
        b"3\nabc\n",
    ]
    chunks.insert(draw.randrange(len(chunks) + 1), draw.choice(wrong))
    ending = draw.choice([b"0\r\n\r\n", b"0\r\nX: y\r\n\r\n", b"", b"0\r\n"])
    return head.encode() + b"".join(chunks) + ending, False


def _pipelined(draw: random.Random) -> tuple[bytes, bool]:
    """Several requests without waiting; the last one asks to close."""
    paths = [draw.choice(["/health", "/v1/models", "/none"]) for _ in range(draw.randint(1, 8))]
    gets = b"".join(f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode() for path in paths)
    if chance(draw, 0.3):
        body = post(COMPLETIONS, _SMALL).replace(b"Connection: close\r\n", b"")
        gets += body
    return gets + post(TOKENIZE, b'{"prompt":"a"}'), True


def _cut(draw: random.Random) -> tuple[bytes, bool]:
    """A request that breaks off anywhere."""
    path = draw.choice([COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE])
    data = post(path, encoded(draw, valid_body(draw, path)))
    return data[: draw.randrange(len(data))], False


def _noise(draw: random.Random) -> tuple[bytes, bool]:
    """No HTTP at all, or a damaged request."""
    kind = draw.randrange(5)
    if kind == 0:
        return draw.randbytes(draw.choice([1, 10, 300, 5000])), False
    if kind == 1:
        return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9), False
    if kind == 2:
        return b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + draw.randbytes(200), False
    if kind == 3:
        return b"\r\n" * draw.choice([1, 100, 50_000]), False
    return _damaged(draw, post(COMPLETIONS, _SMALL)), False


# ---- clients that leave in the middle


def _leaver_input(draw: random.Random, number: int) -> Input:
    path = draw.choice(GENERATING)
    body = valid_body(draw, path) | {
        "max_tokens": draw.choice([20, 100, 300]),
        "stream": chance(draw, 0.7),
        "stream_options": None,
        "min_tokens": 0,
    }
    if chance(draw, 0.2):
        body["n"] = draw.choice([4, 16])
    limit = draw.choice([0, 1, 100, 300, 1000, math.inf])
    leaving = Leaving(limit, draw.choice([0, 0.005, 0.02, 0.1]), reset=chance(draw, 0.3))
    return Input(number, "leaver", post(path, encoded(draw, body)), leaving)


_MAKERS = {
    "schema": _schema_input,
    "body": _body_input,
    "head": _head_input,
    "leaver": _leaver_input,
}
