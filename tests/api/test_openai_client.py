"""The official client, unmodified, against a real server on a loopback port."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import openai
import pytest
import uvicorn
from fastapi import FastAPI

from staffel.api.serving import ApiOptions
from staffel.api.tokens import Tokenizer
from staffel.control.messages import Failure
from tests.api.conftest import MakeApp
from tests.api.doubles import CHAT, deltas, say

MESSAGES = CHAT["messages"]


@asynccontextmanager
async def served(app: FastAPI, key: str = "none") -> AsyncIterator[openai.AsyncOpenAI]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    running = asyncio.create_task(server.serve(sockets=[listener]))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
        yield client
    server.should_exit = True
    await running


async def test_chat_whole_and_streamed(make_app: MakeApp, tokenizer: Tokenizer) -> None:
    app, _ = make_app(say(tokenizer, "Grüße 😀", cached=1), ApiOptions(api_key="k"))
    async with served(app, "k") as client:
        answer = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=1, n=2
        )
        assert [choice.message.content for choice in answer.choices] == ["Grüße 😀"] * 2
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 1
        assert answer.choices[0].logprobs is not None
        text = ""
        async for chunk in await client.chat.completions.create(
            model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        ):
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
        assert text == "Grüße 😀"
        assert chunk.usage is not None


async def test_completions_whole_and_streamed(make_app: MakeApp, tokenizer: Tokenizer) -> None:
    app, _ = make_app(say(tokenizer, "one two"))
    async with served(app) as client:
        answer = await client.completions.create(
            model="tiny", prompt="Hi", echo=True, logprobs=2, extra_body={"top_k": 5}
        )
        assert answer.choices[0].text == "Hione two"
        assert answer.choices[0].logprobs is not None
        stream = await client.completions.create(model="tiny", prompt=[8], stream=True)
        assert "".join([c.choices[0].text async for c in stream]) == "one two"


async def test_models_and_errors(make_app: MakeApp, tokenizer: Tokenizer) -> None:
    app, engine = make_app(say(tokenizer, "x"), ApiOptions(api_key="k"))
    async with served(app, "k") as client:
        assert [model.id async for model in client.models.list()] == ["tiny"]
        assert (await client.models.retrieve("tiny")).id == "tiny"
        with pytest.raises(openai.NotFoundError, match="other"):
            await client.completions.create(model="other", prompt="x")
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model="tiny", prompt="x", max_tokens=64)
        assert caught.value.code == "context_length_exceeded"
        engine.script = lambda request: [Failure(request.id, 429, "full", 1)]
        with pytest.raises(openai.RateLimitError):
            await client.completions.create(model="tiny", prompt="x")
    async with served(app, "wrong") as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()


async def test_a_failure_in_a_stream_is_raised(make_app: MakeApp) -> None:
    app, _ = make_app(
        lambda request: [*deltas(request, [100], None), Failure(request.id, 503, "lost", 1)]
    )
    async with served(app) as client:
        stream = await client.completions.create(model="tiny", prompt="x", stream=True)
        with pytest.raises(openai.APIError, match="lost"):
            async for _ in stream:
                pass


@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize("streamed", [False, True])
async def test_closing_the_connection_cancels(
    make_app: MakeApp, streamed: bool, tokens: int
) -> None:
    app, engine = make_app(lambda request: [*deltas(request, [100], None)[:tokens], None])
    async with served(app) as client:
        asking = asyncio.ensure_future(
            client.completions.create(model="tiny", prompt="x", stream=streamed)
        )
        await asyncio.wait_for(engine.waiting.wait(), 5)
        if asking.done():
            await asking.result().close()
        asking.cancel()
        left = asyncio.get_running_loop().time()
        while not engine.cancelled and asyncio.get_running_loop().time() - left < 5:
            await asyncio.sleep(0.001)
        assert asyncio.get_running_loop().time() - left < 0.2
        assert list(engine.cancelled) == [engine.requests[0].id]
