"""Health, metrics, keys, request ids and the log line."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from staffel.api.serving import ApiOptions
from staffel.api.tokens import Tokenizer
from staffel.control.messages import Failure
from tests.api.conftest import MakeApp
from tests.api.doubles import CHAT, COMPLETION, client_of, complete, post, say, stream


async def test_health_and_readiness(make_app: MakeApp, tokenizer: Tokenizer) -> None:
    app, engine = make_app(say(tokenizer, "x"))
    engine.current = "starting"
    async with client_of(app) as client:
        assert (await client.get("/health")).status_code == 200
        response = await client.get("/ready")
        assert response.status_code == 503
        assert response.headers["retry-after"] == "5"
        engine.current = "ready"
        assert (await client.get("/ready")).status_code == 200


async def test_the_model_is_listed(make_app: MakeApp, tokenizer: Tokenizer) -> None:
    app, _ = make_app(say(tokenizer, "x"), ApiOptions(served_model_name="org/name"))
    async with client_of(app) as client:
        [card] = (await client.get("/v1/models")).json()["data"]
        assert (card["id"], card["max_model_len"]) == ("org/name", 64)
        assert (await client.get("/v1/models/org/name")).json() == card
        assert (await client.get("/v1/models/tiny")).status_code == 404
    answer = await post(app, "/v1/completions", {"prompt": "Hi", "model": "org/name"})
    assert answer.json()["model"] == "org/name"


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (None, 401),
        ("Bearer wrong", 401),
        ("Basic s3cret", 401),
        ("Bearer s3cret", 200),
        ("bearer s3cret", 200),
    ],
)
async def test_the_key(
    make_app: MakeApp, tokenizer: Tokenizer, header: str | None, status: int
) -> None:
    app, _ = make_app(say(tokenizer, "x"), ApiOptions(api_key="s3cret"))
    headers = {} if header is None else {"Authorization": header}
    async with client_of(app, headers=headers) as client:
        requests = [
            await client.get("/v1/models"),
            await client.post("/v1/completions", json=COMPLETION),
            await client.post("/tokenize", json={"prompt": "x"}),
            await client.post("/detokenize", json={"tokens": [8]}),
        ]
        assert [response.status_code for response in requests] == [status] * 4
        if status == 401:
            assert requests[0].json()["error"]["code"] == "invalid_api_key"
        for path in ("/health", "/ready", "/metrics"):
            assert (await client.get(path)).status_code == 200


async def test_request_ids_are_given_and_taken(make_app: MakeApp, tokenizer: Tokenizer) -> None:
    app, engine = make_app(say(tokenizer, "x"))
    async with client_of(app) as client:
        made = await client.post("/v1/completions", json=COMPLETION)
        assert made.json()["id"] == f"cmpl-{made.headers['x-request-id']}"
        headers = {"X-Request-Id": "trace:1/2"}
        for body in (COMPLETION, COMPLETION | {"stream": True}, COMPLETION | {"n": 0}):
            given = await client.post("/v1/completions", json=body, headers=headers)
            assert given.headers["x-request-id"] == "trace:1/2"
    # The same id twice must not be the same request to the engine.
    assert len({request.id for request in engine.requests}) == 3


@pytest.mark.parametrize("bad", ["", "a b", "x" * 129, "a;b"])
async def test_a_bad_request_id_is_refused(
    make_app: MakeApp, tokenizer: Tokenizer, bad: str
) -> None:
    app, _ = make_app(say(tokenizer, "x"))
    async with client_of(app, headers={"X-Request-Id": bad}) as client:
        response = await client.post("/v1/completions", json=COMPLETION)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "X-Request-Id"


async def test_metrics(make_app: MakeApp, tokenizer: Tokenizer) -> None:
    app, engine = make_app(say(tokenizer, "one two", cached=1))
    await complete(app, n=2)
    await stream(app, "/v1/chat/completions", CHAT)
    await post(app, "/v1/completions", COMPLETION | {"n": 0})
    engine.script = lambda request: [Failure(request.id, 429, "full", 1)]
    await post(app, "/v1/completions", COMPLETION)
    async with client_of(app) as client:
        response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    values = dict(line.rsplit(" ", 1) for line in response.text.splitlines() if line[0] != "#")
    numbers = {name: float(value) for name, value in values.items()}

    def requests(endpoint: str, finish: str, status: int) -> float:
        labels = f'endpoint="{endpoint}",finish="{finish}",status="{status}"'
        return numbers[f"staffel_requests_total{{{labels}}}"]

    assert requests("completions", "stop", 200) == 1
    assert requests("chat.completions", "stop", 200) == 1
    assert requests("completions", "error", 400) == 1
    assert requests("completions", "error", 429) == 1
    assert numbers["staffel_output_tokens_total"] == 9
    assert numbers["staffel_cached_prompt_tokens_total"] == 2
    assert numbers["staffel_time_to_first_token_seconds_count"] == 2
    assert numbers["staffel_inter_token_latency_seconds_count"] == 6
    assert numbers["staffel_time_per_output_token_seconds_count"] == 3
    assert numbers["staffel_e2e_latency_seconds_count"] == 2
    assert numbers["staffel_up"] == numbers["staffel_ready"] == 1
    assert numbers["staffel_queued"] == 9
    prefill = 'instance="prefill-0",role="prefill"'
    assert numbers[f"staffel_instance_running{{{prefill}}}"] == 2
    assert numbers[f"staffel_instance_waiting{{{prefill}}}"] == 1
    assert numbers[f'staffel_instance_blocks{{{prefill},state="used"}}'] == 7
    assert numbers[f"staffel_instance_preemptions_total{{{prefill}}}"] == 7
    assert numbers[f"staffel_instance_copied_bytes_total{{{prefill}}}"] == 1 << 20
    assert numbers[f"staffel_instance_copied_seconds_total{{{prefill}}}"] == 0.25
    assert numbers['staffel_instance_ready{instance="decode-0",role="decode"}'] == 0


def lines_of(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [record.fields for record in caplog.records if record.name == "staffel.request"]  # type: ignore[attr-defined]


async def test_one_log_line_per_request(
    make_app: MakeApp, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "staffel.request")
    app, _ = make_app(say(tokenizer, "one two", "length", cached=1))
    await stream(app, "/v1/completions", COMPLETION)
    await post(app, "/v1/chat/completions", {"messages": []})
    async with client_of(app) as client:
        await client.get("/health")
    good, bad = lines_of(caplog)
    # The router has a line of its own for what reaches it.
    assert [record.levelname for record in caplog.records] == ["DEBUG", "INFO"]
    assert good.pop("ttft_ms") <= good.pop("e2e_ms")
    assert good.pop("id") == f"cmpl-{good.pop('request_id')}"
    assert good == {
        "endpoint": "completions",
        "model": "tiny",
        "status": 200,
        "finish": "length",
        "prompt_tokens": 1,
        "cached_tokens": 1,
        "output_tokens": 2,
    }
    assert (bad["endpoint"], bad["status"], bad["finish"]) == ("chat.completions", 400, "error")
    assert bad["ttft_ms"] is None
