"""Requests that nobody should send: each gets a 4xx with OpenAI's error JSON, and no hang."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.server import Server

pytestmark = pytest.mark.e2e

BOTH = ("/v1/completions", "/v1/chat/completions")
DEEP = 100_000

NUMBERS: list[Any] = [-1, -(2**63), 2**31, 2**63, 2**64, 10**400, 1.5, "1", True, [], {}]
"""What no count can be. (1.5 and "1": not numbers of the right kind.)"""

COUNTS = ("max_tokens", "max_completion_tokens", "min_tokens", "n")
SHARES = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty")

FIELDS: list[dict[str, Any]] = [
    *({field: value} for field in COUNTS for value in NUMBERS),
    *({field: value} for field in SHARES for value in (-3, 3, 10**400, "1", True, [], {})),
    *({"top_k": value} for value in (-2, 2**31, 1.5, "1", True)),
    *({"seed": value} for value in (2**63, -(2**63) - 1, 1.5, "1", [])),
    *({"repetition_penalty": value} for value in (0, -1, "1")),
    *({"stop": value} for value in ("", [""], [1], {}, [["a"]])),
    *({"stop_token_ids": value} for value in ([-1], [2**31], [2**70], ["a"], "a", 1)),
    *({"logit_bias": value} for value in ({"-1": 1}, {"99999999": 1}, {"a": 1}, {"1": 1e9}, [1])),
    *({"logprobs": value} for value in (-1, 21, 2**70, "yes", [])),
    *({"response_format": value} for value in (
        1, "json", {}, {"type": 1}, {"type": "grammar"}, {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/nowhere"}}},
        {"type": "json_schema", "json_schema": {"schema": {"type": "no type"}}},
        {"type": "json_schema", "json_schema": {"schema": {"pattern": "(", "type": "string"}}},
    )),
    *({"stream": value} for value in (1, "true", [])),
    {"stream": True, "stream_options": {"include_usage": "yes"}},
    {"stream": True, "stream_options": []},
    *({"model": value} for value in ("", "other", 1, [], "x" * 100_000, "\N{PARROT}")),
    {"unknown": 1}, {"": 1}, {"__proto__": {}}, {"max_tokens ": 1},
    {"tools": [{}]}, {"best_of": 3}, {"suffix": "x"}, {"use_beam_search": True},
]  # fmt: skip

PROMPTS: list[Any] = [
    1, -1, True, {}, [], "", [""], [[]], [[1], 1], ["a", 1], [-1], [2**31], [2**70], [1.5], [None],
    [["a"]], "x" * 1_000_000, "word " * 200_000, [1] * 100_000, ["word " * 200_000],
    [[1]] * 3 + [[1] * 9000], "\x00" * 100_000,
]  # fmt: skip

MESSAGES: list[Any] = [
    1, "hi", {}, [], [1], ["hi"], [[]], [{}], [{"role": "user"}], [{"content": "hi"}],
    [{"role": "king", "content": "hi"}], [{"role": 1, "content": "hi"}],
    [{"role": "user", "content": 1}], [{"role": "user", "content": [1]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    [{"role": "user", "content": "hi", "unknown": 1}],
    [{"role": "user", "content": "word " * 200_000}],
    [{"role": "user", "content": "hi"}] * 20_000,
]  # fmt: skip

RAW: dict[str, bytes] = {
    "nothing": b"",
    "a brace": b"{",
    "no JSON": b"prompt=hello",
    "a list": b"[]",
    "a number": b"1",
    "null": b"null",
    "bad UTF-8": b'{"prompt": "\xff\xfe"}',
    "half a surrogate": b'{"prompt": "\\ud83d"}',
    "a zero byte": b'{"prompt": "a\x00b"}',
    "NaN": b'{"prompt": "a", "temperature": NaN}',
    "infinity": b'{"prompt": "a", "temperature": Infinity}',
    "1e999": b'{"prompt": "a", "temperature": 1e999}',
    "many digits": b'{"prompt": "a", "max_tokens": ' + b"9" * 100_000 + b"}",
    "deep list": b'{"prompt": ' + b"[" * DEEP + b"]" * DEEP + b"}",
    "deep object": b'{"user": ' + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"}",
    "deep schema": b'{"prompt": "a", "messages": [{"role": "user", "content": "a"}], '
    b'"response_format": {"type": "json_schema", "json_schema": {"schema": '
    + b'{"type": "array", "items":' * 500 + b"{}" + b"}" * 500 + b"}}}",
    "a megabyte of zeros": bytes(1 << 20),
    "trailing": b'{"prompt": "a"} x',
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def serves_afterwards(disaggregated: Server) -> Iterator[None]:
    """No request of this module leaves a trace."""
    yield
    assert "Paris" in disaggregated.greedy("What is the capital of France?")
    assert disaggregated.quiet
    assert disaggregated.errors() == []


def check_refused(server: Server, path: str, raw: bytes) -> None:
    answer = server.http.post(path, content=raw, timeout=10)
    assert 400 <= answer.status_code < 500, (answer.status_code, answer.text[:300])
    error = answer.json()["error"]
    assert error["message"]
    assert error["type"] == "invalid_request_error"
    assert len(answer.content) < 10_000


def good_body(path: str) -> dict[str, Any]:
    if path == BOTH[0]:
        return {"prompt": "Hello", "max_tokens": 1}
    return {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("fields", FIELDS, ids=lambda fields: str(fields)[:60])
def test_fields(disaggregated: Server, path: str, fields: dict[str, Any]) -> None:
    check_refused(disaggregated, path, json.dumps(good_body(path) | fields).encode())


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: str(prompt)[:30])
def test_prompts(disaggregated: Server, prompt: Any) -> None:
    check_refused(disaggregated, BOTH[0], json.dumps({"prompt": prompt}).encode())


@pytest.mark.parametrize("messages", MESSAGES, ids=lambda messages: str(messages)[:60])
def test_messages(disaggregated: Server, messages: Any) -> None:
    check_refused(disaggregated, BOTH[1], json.dumps({"messages": messages}).encode())


@pytest.mark.parametrize("path", [*BOTH, "/tokenize", "/detokenize"])
@pytest.mark.parametrize("raw", RAW.values(), ids=RAW.keys())
def test_bodies(disaggregated: Server, path: str, raw: bytes) -> None:
    check_refused(disaggregated, path, raw)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/metrics", 405),
        ("GET", "/v1/models/other", 404),
        ("GET", "/v1/models/..%2f..%2fetc%2fpasswd", 404),
        ("POST", "/v1/embeddings", 404),
        ("PATCH", "/v1/models", 405),
    ],
)
def test_routes(disaggregated: Server, method: str, path: str, status: int) -> None:
    answer = disaggregated.http.request(method, path)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize("value", ["", "a b", "x" * 129, "é", "a\tb"])
def test_request_ids(disaggregated: Server, value: str) -> None:
    headers = {"X-Request-Id": value.encode()}
    answer = disaggregated.http.get("/v1/models", headers=headers)
    assert answer.status_code == 400
    assert "X-Request-Id" in answer.json()["error"]["message"]
