"""What clients see when the engine can't, and what the engine sees when clients leave."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.types import Message

from staffel.api.tokens import Tokenizer
from staffel.control.messages import Failure
from staffel.control.request import Request
from tests.api.conftest import MakeApp
from tests.api.doubles import (
    CHAT,
    COMPLETION,
    ScriptedEngineDouble,
    deltas,
    post,
    say,
    sse,
)

ENDPOINTS = [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]


def fails(status: int, retry_after: int | None, *, after: int = 0) -> Any:
    """A script that gives some tokens and then up."""

    def script(request: Request) -> list[Any]:
        failure = Failure(request.id, status, "no capacity", retry_after)
        return [*deltas(request, [100] * after, None)[:after], failure]

    return script


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
@pytest.mark.parametrize(
    ("status", "given", "told"), [(429, 7, "7"), (503, None, "5"), (504, None, None)]
)
async def test_a_failure_before_the_first_token_is_a_status(
    make_app: MakeApp,
    path: str,
    body: dict[str, Any],
    streamed: bool,
    status: int,
    given: int | None,
    told: str | None,
) -> None:
    app, _ = make_app(fails(status, given))
    response = await post(app, path, body | {"stream": streamed})
    assert response.status_code == status
    assert response.headers.get("retry-after") == told
    assert response.json()["error"]["code"] == status
    assert "no capacity" in response.json()["error"]["message"]


@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
async def test_a_failure_in_a_stream_is_its_last_event(
    make_app: MakeApp, path: str, body: dict[str, Any]
) -> None:
    app, _ = make_app(fails(503, 1, after=2))
    response = await post(app, path, body | {"stream": True})
    assert response.status_code == 200
    *chunks, last = sse(response.text)
    assert all(chunk["choices"] for chunk in chunks)
    assert last["error"]["code"] == 503


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_failed_choice_ends_the_others(make_app: MakeApp, streamed: bool) -> None:
    def script(request: Request) -> list[Any]:
        if request.params.choice == 1:
            return [Failure(request.id, 503, "gone", 1)]
        return [*deltas(request, [100], None), None]

    app, engine = make_app(script)
    await post(app, "/v1/completions", COMPLETION | {"n": 3, "stream": streamed})
    assert {engine.requests[0].id, engine.requests[2].id} <= engine.cancelled.keys()


@pytest.mark.parametrize("state", ["starting", "draining", "degraded"])
async def test_a_server_that_is_not_ready(
    make_app: MakeApp, tokenizer: Tokenizer, state: Any
) -> None:
    app, engine = make_app(say(tokenizer, "x"))
    engine.current = state
    for streamed in (False, True):
        response = await post(app, "/v1/completions", COMPLETION | {"stream": streamed})
        assert response.status_code == 503
        assert response.headers["retry-after"] == "5"
    assert engine.requests == []


async def test_an_engine_that_breaks_its_promise_is_a_500_and_no_hang(make_app: MakeApp) -> None:
    app, engine = make_app(lambda request: deltas(request, [100], None))
    response = await post(app, "/v1/completions", COMPLETION)
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert response.headers["x-request-id"]
    assert list(engine.cancelled) == [engine.requests[0].id]


class LeavingClient:
    """One HTTP exchange at ASGI level, whose client leaves when told to."""

    def __init__(self, app: FastAPI, path: str, body: dict[str, Any]) -> None:
        self._left = asyncio.Event()
        self._body: bytes | None = json.dumps(body).encode()
        self.sent: list[Message] = []
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [],
        }
        self.exchange = asyncio.ensure_future(app(self.scope, self._receive, self._send))

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self.sent.append(message)

    async def leave(self) -> float:
        """Leave, wait for the server to notice; seconds of the monotonic clock at leaving."""
        self._left.set()
        left = time.monotonic()
        await asyncio.wait_for(self.exchange, 5)
        return left


@pytest.mark.parametrize("tokens", [0, 2])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
async def test_a_client_that_leaves_ends_its_choices_at_once(
    make_app: MakeApp, path: str, body: dict[str, Any], streamed: bool, tokens: int
) -> None:
    app, engine = make_app(lambda request: [*deltas(request, [100] * 3, None)[:tokens], None])
    client = LeavingClient(app, path, body | {"stream": streamed, "n": 2})
    await asyncio.wait_for(engine.waiting.wait(), 5)
    left = await client.leave()
    assert set(engine.cancelled) == {request.id for request in engine.requests}
    assert len(engine.cancelled) == 2
    assert max(engine.cancelled.values()) - left < 0.1


async def test_a_client_that_left_before_the_engine_was_asked(make_app: MakeApp) -> None:
    app, engine = make_app(lambda request: [None])
    client = LeavingClient(app, "/v1/completions", COMPLETION)
    await client.leave()
    assert engine.cancelled.keys() == {request.id for request in engine.requests}


async def test_a_client_that_does_not_read_is_not_waited_for(
    make_app: MakeApp, tokenizer: Tokenizer
) -> None:
    """Leaving is noticed also while an event is stuck on its way out."""
    app, engine = make_app(lambda request: [*deltas(request, [100] * 3, None), None])
    client = LeavingClient(app, "/v1/completions", COMPLETION | {"stream": True})
    stuck = asyncio.Event()

    async def send(message: Message) -> None:
        stuck.set()
        await asyncio.Event().wait()

    client._send = send  # type: ignore[method-assign]
    client.exchange.cancel()
    client.exchange = asyncio.ensure_future(app(client.scope, client._receive, send))
    await asyncio.wait_for(stuck.wait(), 5)
    await client.leave()
    assert set(engine.cancelled) == {request.id for request in engine.requests}


async def test_a_finished_request_is_not_cancelled(make_app: MakeApp, tokenizer: Tokenizer) -> None:
    app, engine = make_app(say(tokenizer, "x"))
    await post(app, "/v1/completions", COMPLETION | {"n": 3})
    assert isinstance(engine, ScriptedEngineDouble)
    assert engine.cancelled == {}


async def test_after_a_refusal_the_rest_is_not_sent(make_app: MakeApp) -> None:
    def script(request: Request) -> list[Any]:
        place = int(request.id.rpartition("-")[2])
        return [None] if place < 20 else [Failure(request.id, 429, "the queue is full", 7)]

    app, engine = make_app(script)
    response = await post(app, "/v1/completions", {"prompt": ["Hi"] * 500})
    assert response.status_code == 429
    assert len(engine.requests) < 60
    assert engine.cancelled.keys() >= {request.id for request in engine.requests[:20]}


async def test_a_schema_that_fails_in_the_middle_is_the_clients(make_app: MakeApp) -> None:
    app, _ = make_app(fails(400, None, after=2))
    response = await post(app, "/v1/completions", COMPLETION)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "response_format"


async def test_a_request_with_many_choices_has_some_of_them_under_way(make_app: MakeApp) -> None:
    """The engine's queue is for others too."""

    def script(request: Request) -> list[Any]:
        place = int(request.id.rpartition("-")[2])
        return deltas(request, [100], "length") if place < 100 else [None]

    app, engine = make_app(script)
    asking = asyncio.create_task(post(app, "/v1/completions", {"prompt": ["Hi"] * 700}))
    while len(engine.requests) < 356:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    assert len(engine.requests) == 356, "256, and one for each that has ended"
    assert {request.group for request in engine.requests} == {engine.requests[0].group}
    asking.cancel()
