"""A test double of the engine, and what tests feed it with."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import httpx
from fastapi import FastAPI

from staffel.api.engine import State
from staffel.api.tokens import Tokenizer
from staffel.config import ModelSpec
from staffel.control.messages import Delta, Failure, Load
from staffel.control.request import FinishReason, Request, TokenLogprobs

EOS = 2
Script = Callable[[Request], Iterable[Delta | Failure | None]]


@dataclass(frozen=True)
class StatusDouble:
    instance: str
    role: str
    ready: bool
    load: Load | None
    restarts: int = 0
    reason: str = ""

    @property
    def state(self) -> str:
        return "ready" if self.ready else "waiting"


class ScriptedEngineDouble:
    """Answers every request with the items of a script; None in a script waits for ever."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[Request] = []
        self.cancelled: dict[str, float] = {}
        """When each request was cancelled, in seconds of the monotonic clock."""
        self.waiting = asyncio.Event()
        """Set when a script has come to its None."""
        self.current: State = "ready"

    def submit(self, request: Request) -> AsyncIterator[Delta | Failure]:
        self.requests.append(request)
        return self._play(request)

    async def _play(self, request: Request) -> AsyncIterator[Delta | Failure]:
        for item in self.script(request):
            if item is None:
                self.waiting.set()
                await asyncio.Event().wait()
            else:
                yield item
                await asyncio.sleep(0)

    def cancel(self, request_id: str) -> None:
        self.cancelled.setdefault(request_id, time.monotonic())

    def state(self) -> State:
        return self.current

    @property
    def queued(self) -> int:
        return 9

    def status(self) -> list[StatusDouble]:
        load = Load(2, 1, 3, 4, 5, 16, 7, 8, 1 << 20, 0.25)
        return [
            StatusDouble("prefill-0", "prefill", True, load),
            StatusDouble("decode-0", "decode", False, None),
        ]


def make_spec(**changes: Any) -> ModelSpec:
    fields: dict[str, Any] = {
        "name": "tiny",
        "path": "/models/tiny",
        "model_type": "llama",
        "architecture": "LlamaForCausalLM",
        "vocab_size": 49152,
        "max_model_len": 64,
        "eos_ids": (EOS,),
    }
    return ModelSpec(**(fields | changes))


def scores_of(id: int, top: int) -> TokenLogprobs:
    """The drawn token is the likeliest; its neighbours follow."""
    likeliest = [(id + place, -0.25 - place) for place in range(top)]
    return TokenLogprobs(id, -0.25, 1, likeliest)


def deltas(
    request: Request,
    ids: list[int],
    finish: FinishReason | None = "stop",
    *,
    group: int = 1,
    cached: int = 0,
) -> list[Delta | Failure | None]:
    """The ids in deltas of `group` ids, the last one finishing (None: it doesn't)."""
    params = request.params
    made: list[Delta | Failure | None] = []
    for start in range(0, max(len(ids), 1), group):
        part = ids[start : start + group]
        first, last = start == 0, start + group >= len(ids)
        scores = None
        if params.logprobs is not None:
            scores = [scores_of(id, params.logprobs) for id in part]
        prompt_scores = None
        if first and params.prompt_logprobs is not None:
            prompt_scores = [scores_of(id, params.prompt_logprobs) for id in request.prompt[1:]]
        made.append(
            Delta(
                request.id,
                start,
                part,
                scores,
                finish if last else None,
                cached if first else None,
                prompt_scores,
            )
        )
    return made


def say(
    tokenizer: Tokenizer,
    text: str,
    finish: FinishReason = "stop",
    *,
    group: int = 1,
    cached: int = 0,
) -> Script:
    """Every choice says `text`; with finish "stop" the end-of-sequence token follows."""
    [ids] = tokenizer.encode([text], add_special_tokens=False)
    ids = [*ids, EOS] if finish == "stop" else ids
    return lambda request: deltas(request, ids, finish, group=group, cached=cached)


def client_of(app: FastAPI, **kwargs: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test", **kwargs)


async def post(app: FastAPI, path: str, body: Any) -> httpx.Response:
    async with client_of(app) as client:
        return await client.post(path, json=body)


async def complete(app: FastAPI, **fields: Any) -> dict[str, Any]:
    response = await post(app, "/v1/completions", {"model": "tiny", "prompt": "Hi"} | fields)
    assert response.status_code == 200, response.text
    return response.json()


async def chat(app: FastAPI, **fields: Any) -> dict[str, Any]:
    response = await post(app, "/v1/chat/completions", CHAT | fields)
    assert response.status_code == 200, response.text
    return response.json()


async def stream(app: FastAPI, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a streamed answer that ends as it should."""
    response = await post(app, path, body | {"stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = sse(response.text)
    assert events[-1] == "[DONE]"
    return events[:-1]


def sse(text: str) -> list[Any]:
    lines = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": "Hi"}
