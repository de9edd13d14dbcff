"""A whole system in this process: the real service, router, engines and executors, in threads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from staffel.api.server import ServeOptions, make_service
from staffel.config import InstanceSpec, ModelSpec, Placement, Role
from staffel.control.messages import Delta, Failure, Load
from staffel.control.request import Request, SamplingParams, TokenLogprobs
from staffel.runtime.launcher import ThreadLauncher
from staffel.runtime.service import Service

DEADLINE_S = 60


@dataclass
class Output:
    """All that a client was told of a request."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None
    cached_tokens: int | None = None
    finish: str | None = None
    failure: Failure | None = None


def placement(roles: Sequence[Role], **settings: object) -> Placement:
    defaults = {"threads": 1, "kv_memory": "8MiB"}
    specs = tuple(InstanceSpec(role=role, **{**defaults, **settings}) for role in roles)
    return Placement(instances=specs)


@asynccontextmanager
async def running(
    model: ModelSpec, roles: Sequence[Role], *, options: dict | None = None, **settings: object
) -> AsyncIterator[Service]:
    """A service whose instances are ready; at the end all must be at rest."""
    serve = ServeOptions(placement=placement(roles, **settings), **(options or {}))
    service, _ = make_service(model, serve, ThreadLauncher())
    try:
        await asyncio.wait_for(service.start(), DEADLINE_S)
        yield service
        await at_rest(service)
    finally:
        await service.stop()


def model_spec(path: Path, max_model_len: int | None = None) -> ModelSpec:
    return ModelSpec.load(path, name=path.name, max_model_len=max_model_len)


def greedy(name: str, prompt: list[int], max_tokens: int, **params: object) -> Request:
    return Request(
        id=name,
        prompt=prompt,
        params=SamplingParams(max_tokens=max_tokens, temperature=0.0, **params),
    )


async def generate(service: Service, request: Request) -> Output:
    output = Output()
    async for news in service.submit(request):
        _add(output, news)
    return output


async def generate_all(service: Service, requests: Sequence[Request]) -> list[Output]:
    """All in flight together."""
    together = asyncio.gather(*(generate(service, request) for request in requests))
    return await asyncio.wait_for(together, DEADLINE_S)


def _add(output: Output, news: Delta | Failure) -> None:
    if isinstance(news, Failure):
        output.failure = news
        return
    assert news.index == len(output.ids)
    output.ids += news.ids
    output.logprobs += news.logprobs or []
    output.finish = news.finish
    if news.index == 0:
        output.cached_tokens = news.cached_tokens
        output.prompt_logprobs = news.prompt_logprobs


async def at_rest(service: Service) -> None:
    """Wait until nothing runs and nothing is kept on any instance."""

    async def poll() -> None:
        while not all(_rests(status.load) for status in service.status() if status.ready):
            await asyncio.sleep(0.01)

    await asyncio.wait_for(poll(), DEADLINE_S)


def _rests(load: Load | None) -> bool:
    if load is None:
        return True
    busy = load.running or load.waiting or load.pinned
    return not busy and load.free_blocks + load.cached_blocks == load.total_blocks
