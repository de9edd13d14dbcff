"""--api-key, --served-model-name, --max-queue, --request-timeout."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from tests.e2e.conftest import MakeServer
from tests.e2e.server import Server, until

pytestmark = pytest.mark.e2e

KEY = "a secret"
TIMEOUT_S = 3
OPTIONS = (
    ("--api-key", KEY),
    ("--served-model-name", "mine"),
    ("--max-queue", "1"),
    ("--request-timeout", str(TIMEOUT_S)),
    ("--prefill", "1"),
)


@pytest.fixture(scope="module")
def server(make_server: MakeServer) -> Iterator[Server]:
    with make_server(*(part for option in OPTIONS for part in option)) as server:
        server.http.headers["Authorization"] = f"Bearer {KEY}"
        yield server


@pytest.mark.parametrize("header", [None, "Bearer wrong", f"Basic {KEY}", KEY, "Bearer"])
def test_wrong_keys(server: Server, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header}
    for path in ("/v1/models", "/v1/nothing"):
        refused = httpx.get(server.url + path, headers=headers)
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"


def test_open_paths(server: Server) -> None:
    for path in ("/health", "/ready", "/metrics"):
        assert httpx.get(server.url + path).status_code == 200


def test_the_name(server: Server) -> None:
    assert server.http.get("/v1/models").json()["data"][0]["id"] == "mine"
    body = {"model": "mine", "prompt": "One two", "max_tokens": 1}
    assert server.http.post("/v1/completions", json=body).json()["model"] == "mine"
    refused = server.http.post("/v1/completions", json=body | {"model": "other"})
    assert refused.status_code == 404
    assert "mine" in refused.json()["error"]["message"]


def test_a_full_queue_and_slow_answers(server: Server) -> None:
    """One keeps prefill busy, one of three more waits in the router, the others are refused.

    Those that aren't refused take longer than they may: 504, and nothing of them is left.
    """

    def send(first: int) -> httpx.Response:
        body = {"prompt": [first, *range(500, 3500)], "max_tokens": 4000, "ignore_eos": True}
        return server.http.post("/v1/completions", json=body, timeout=TIMEOUT_S + 5)

    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(send, 400)]
        until(lambda: not server.quiet, 5, "the first is at work")
        answers += [pool.submit(send, first) for first in (401, 402, 403)]
        by_status = sorted((answer.result() for answer in answers), key=lambda a: a.status_code)
    assert [answer.status_code for answer in by_status] == [429, 429, 504, 504]
    check_refusal(by_status[0])
    assert "--request-timeout" in by_status[-1].json()["error"]["message"]
    until(lambda: server.quiet, 2, "everything is free")
    assert server.errors() == []


def check_refusal(answer: httpx.Response) -> None:
    assert int(answer.headers["Retry-After"]) >= 1
    assert answer.json()["error"]["type"] == "rate_limit_error"
    assert "--max-queue" in answer.json()["error"]["message"]


def test_the_client_sees_its_errors(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        client.models.list()
