"""What is found out about a server before it is measured."""

from __future__ import annotations

from typing import Any

import pytest

from staffel.bench.endpoint import Address, Endpoint, Features
from staffel.bench.preflight import discover
from staffel.bench.workload import Ask
from staffel.config import ConfigError
from tests.bench.fake_server import Behaviour, FakeServer


async def found(fields: dict[str, Any] | None = None, **options: Any) -> Endpoint:
    async with FakeServer(**(fields or {})) as server:
        return await discover(server.url, **options)


async def test_a_server_that_supports_everything() -> None:
    endpoint = await found({"token_ids": True})
    assert endpoint.model == "fake"
    assert endpoint.max_model_len == 4096
    assert endpoint.notes == ()
    # Ids beside continuous usage would only make the server's chunks longer.
    assert endpoint.features == Features(ignore_eos=True, include_usage=True, continuous_usage=True)


async def test_ids_are_used_where_usage_is_not_continuous() -> None:
    endpoint = await found({"token_ids": True, "usage": "final"})
    assert endpoint.features == Features(ignore_eos=True, include_usage=True, token_ids=True)
    assert endpoint.notes == ("continuous_usage_stats: no effect",)


@pytest.mark.parametrize(
    ("refused", "feature"),
    [
        ("ignore_eos", "ignore_eos"),
        ("continuous_usage_stats", "continuous_usage"),
        ("return_token_ids", "token_ids"),
    ],
)
async def test_a_field_that_is_refused_by_name_is_left_out(refused: str, feature: str) -> None:
    endpoint = await found({"refuses": (refused,), "token_ids": True})
    assert not getattr(endpoint.features, feature)
    assert endpoint.features.include_usage
    assert endpoint.notes[0] == f"{refused}: refused"


async def test_a_server_without_stream_options() -> None:
    endpoint = await found({"refuses": ("stream_options",), "token_ids": True})
    assert endpoint.features == Features(ignore_eos=True, token_ids=True)


async def test_a_refusal_without_a_name_leaves_out_all_optional_fields() -> None:
    def picky(body: dict[str, Any]) -> Behaviour:
        fields = {"model", "prompt", "max_tokens", "stream"}
        return Behaviour(logprobs=True, status=200 if body.keys() <= fields else 400)

    endpoint = await found({"behaviour": picky})
    assert endpoint.features == Features()
    assert all("without naming" in note for note in endpoint.notes)


async def test_a_server_that_counts_max_completion_tokens() -> None:
    def newer(body: dict[str, Any]) -> Behaviour:
        old = "max_tokens" in body
        message = "use 'max_completion_tokens' in place of 'max_tokens'"
        return Behaviour(status=400 if old else 200, message=message)

    endpoint = await found({"behaviour": newer}, api="chat")
    assert endpoint.limit_field == "max_completion_tokens"


async def test_a_server_that_never_tells_tokens_needs_a_tokenizer() -> None:
    with pytest.raises(ConfigError, match="--tokenizer"):
        await found({"usage": "none"})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"status": 503, "message": "starting"}, "HTTP 503: starting"),
        ({"json_answer": True}, "doesn't stream"),
        ({"error_at": 0}, "it broke"),
        ({"tokens": 0}, "no content"),
        ({"status": 400, "message": "bad model"}, "refuses a plain request: bad model"),
    ],
)
async def test_a_server_that_cannot_be_measured(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        await found(fields)


async def test_the_model_must_be_named_where_there_are_several() -> None:
    async with FakeServer() as server:
        server.models = [{"id": "a"}, {"id": "b", "max_model_len": 7}]
        with pytest.raises(ConfigError, match=r"--model: .* lists a, b"):
            await discover(server.url)
        endpoint = await discover(server.url, model="b")
        assert (endpoint.model, endpoint.max_model_len) == ("b", 7)
        assert server.log[-1].body["model"] == "b"


async def test_the_api_key_is_sent_with_every_request() -> None:
    async with FakeServer() as server:
        server.api_key = "secret"
        with pytest.raises(ConfigError, match="--api-key"):
            await discover(server.url, api_key="wrong")
        assert (await discover(server.url, api_key="secret")).api_key == "secret"


async def test_an_unreachable_server() -> None:
    with pytest.raises(ConfigError, match="is the server running"):
        await discover("http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("url", "full"),
    [
        ("http://h:8000", "http://h:8000/v1"),
        ("http://h:8000/", "http://h:8000/v1"),
        ("http://h:8000/v1", "http://h:8000/v1"),
        ("https://h/v1/", "https://h/v1"),
        ("https://h/openai", "https://h/openai/v1"),
        ("https://h/api/v3", "https://h/api/v3"),
        ("http://[::1]:80", "http://[::1]/v1"),
    ],
)
def test_urls(url: str, full: str) -> None:
    assert str(Address.parse(url)) == full


@pytest.mark.parametrize("url", ["h:8000", "ftp://h", "http://", "http://h:x", "http://h/?a=1"])
def test_wrong_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="URL"):
        Address.parse(url)


def test_fields_of_the_measurement_cannot_be_set_from_outside() -> None:
    address = Address.parse("http://h")
    with pytest.raises(ConfigError, match="--extra-body: n, stream"):
        Endpoint(address=address, model="x", extra={"n": 2, "stream": False, "top_k": 1})


def test_chat_cannot_take_token_ids() -> None:
    endpoint = Endpoint(address=Address.parse("http://h"), model="x", api="chat")
    with pytest.raises(ConfigError, match="--api"):
        endpoint.request(Ask([1, 2], 3, 2))


async def test_extra_fields_go_along_and_stream_options_are_joined() -> None:
    extra = {"temperature": 0, "stream_options": {"mine": 1}}
    async with FakeServer() as server:
        await discover(server.url, extra=extra)
        body = server.log[-1].body
    assert body["temperature"] == 0
    assert body["stream_options"] == {
        "include_usage": True,
        "continuous_usage_stats": True,
        "mine": 1,
    }
