"""Every bad request gets a 400 (or 404) that names the field, and never reaches the engine."""

from __future__ import annotations

from typing import Any

import pytest

from staffel.api.limits import Limits
from staffel.api.serving import ApiOptions
from staffel.api.tokens import Tokenizer
from tests.api.conftest import MakeApp
from tests.api.doubles import CHAT, COMPLETION, client_of, post, say

BOTH: list[tuple[dict[str, Any], str]] = [
    ({"nonsense": 1}, "nonsense"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": 2**40}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": 2, "max_completion_tokens": 3}, "max_tokens"),
    ({"max_tokens": 2, "min_tokens": 3}, "min_tokens"),
    ({"min_tokens": 1000}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"seed": 2**64}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": True}, "n"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": 3}, "stop"),
    ({"stop": ["x"] * 257}, "stop"),
    ({"stop": "x" * 1025}, "stop"),
    ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"stop_token_ids": [49152]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"49152": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"bad": 1}}, "stream_options.bad"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_object", "json_schema": {"schema": {}}}},
     "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
     "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}},
     "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "foo"}}}},
     "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"x-guidance": {}}}}},
     "response_format"),
    ({"response_format": {"type": "json_schema",
                          "json_schema": {"schema": {"const": "x" * 300_000}}}}, "response_format"),
    ({"response_format": {"type": "json_schema",
                          "json_schema": {"schema": {"const": -(2**63) + 1}}}}, "response_format"),
    ({"best_of": 2}, "best_of"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"suffix": "x"}, "suffix"),
    ({"store": True}, "store"),
    ({"store": 0}, "store"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"model": 3}, "model"),
]  # fmt: skip

COMPLETIONS_ONLY: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [[1], 1]}, "prompt"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": [49152]}, "prompt"),
    ({"prompt": [2**70]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": ["a"] * 1025}, "n"),
    ({"prompt": ["a"] * 9, "n": 128}, "n"),
    ({"prompt": "x" * 2_000_000}, "prompt"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"top_logprobs": 1}, "top_logprobs"),
    ({"messages": [{"role": "user", "content": "Hi"}]}, "messages"),
]

CHAT_ONLY: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [{"role": "user", "content": "x" * 2_000_000}]}, "messages"),
    ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": ["user"], "content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["Hi"]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
     "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]},
     "messages[0].content[0].text"),
    ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
     "messages[0].tool_calls"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"echo": True}, "echo"),
    ({"prompt": "Hi"}, "prompt"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ({"tool_choice": "required"}, "tool_choice"),
]  # fmt: skip

CASES = [
    *(("/v1/completions", COMPLETION | fields, field) for fields, field in BOTH),
    *(("/v1/chat/completions", CHAT | fields, field) for fields, field in BOTH),
    *(("/v1/completions", COMPLETION | fields, field) for fields, field in COMPLETIONS_ONLY),
    *(("/v1/chat/completions", CHAT | fields, field) for fields, field in CHAT_ONLY),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": 3}, "prompt"),
    ("/tokenize", {"messages": []}, "messages"),
    ("/detokenize", {"tokens": [49152]}, "tokens"),
    ("/detokenize", {"tokens": "x"}, "tokens"),
]


@pytest.mark.parametrize(("path", "body", "field"), CASES)
async def test_a_bad_field_is_named(
    make_app: MakeApp, tokenizer: Tokenizer, path: str, body: dict[str, Any], field: str
) -> None:
    app, engine = make_app(say(tokenizer, "x"))
    response = await post(app, path, body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == field, error
    assert error["message"].startswith(field)
    assert error["type"] == "invalid_request_error"
    assert engine.requests == []


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"nope", b"[1]", b'"x"', b"\xff\xfe", b'{"prompt": "\\ud800 x"}', b"[" * 100_000,
     b'{"temperature": 1e999}', b'{"temperature": NaN}', b'{"metadata":' * 100_000],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
async def test_a_body_that_is_no_json_object(
    make_app: MakeApp, tokenizer: Tokenizer, path: str, raw: bytes
) -> None:
    app, _ = make_app(say(tokenizer, "x"))
    async with client_of(app) as client:
        response = await client.post(path, content=raw)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_another_model(make_app: MakeApp, tokenizer: Tokenizer, path: str) -> None:
    app, _ = make_app(say(tokenizer, "x"))
    body = CHAT if path.endswith("chat/completions") else COMPLETION
    response = await post(app, path, body | {"model": "other"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("prompt", "extra", "fits", "param"),
    [
        (63, {}, True, None),
        (64, {}, False, "prompt"),
        (60, {"max_tokens": 4}, True, None),
        (60, {"max_tokens": 5}, False, "max_tokens"),
        (60, {"max_completion_tokens": 5}, False, "max_completion_tokens"),
        (64, {"max_tokens": 0, "echo": True}, True, None),
        (65, {"max_tokens": 0, "echo": True}, False, "prompt"),
    ],
)
async def test_the_context_must_hold_prompt_and_output(
    make_app: MakeApp,
    tokenizer: Tokenizer,
    prompt: int,
    extra: dict[str, Any],
    fits: bool,
    param: str | None,
) -> None:
    app, engine = make_app(say(tokenizer, "x"))
    response = await post(app, "/v1/completions", {"prompt": [9] * prompt} | extra)
    assert response.status_code == (200 if fits else 400)
    assert len(engine.requests) == fits
    if not fits:
        error = response.json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
        assert "64 tokens" in error["message"]
        assert f"{prompt} in the prompt" in error["message"]


async def test_a_chat_that_is_too_long(make_app: MakeApp, tokenizer: Tokenizer) -> None:
    app, _ = make_app(say(tokenizer, "x"))
    messages = [{"role": "user", "content": "one " * 64}]
    response = await post(app, "/v1/chat/completions", {"messages": messages})
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


async def test_a_chat_with_a_token_that_the_model_lacks(
    make_app: MakeApp, tokenizer: Tokenizer
) -> None:
    """As with fine-tunes whose tokenizer has more tokens than the model has rows."""
    [ids] = tokenizer.encode(["Hi tokenizer"], add_special_tokens=False)
    app, engine = make_app(say(tokenizer, "x"), vocab_size=max(ids))
    response = await post(
        app, "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi tokenizer"}]}
    )
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"
    assert str(max(ids)) in response.json()["error"]["message"]
    assert engine.requests == []


async def test_more_ids_than_a_context_has(make_app: MakeApp, tokenizer: Tokenizer) -> None:
    app, _ = make_app(say(tokenizer, "x"))
    assert (await post(app, "/detokenize", {"tokens": [9] * 64})).status_code == 200
    response = await post(app, "/detokenize", {"tokens": [9] * 65})
    assert response.json()["error"]["param"] == "tokens"


async def test_prompts_after_one_that_is_too_long_are_not_looked_at(
    make_app: MakeApp, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda t, **how: seen.extend(t) or encode(t, **how))
    app, _ = make_app(say(tokenizer, "x"))
    long = "one " * 64
    response = await post(app, "/v1/completions", {"prompt": ["a", long, "b", long]})
    assert response.status_code == 400
    assert seen[-2:] == ["a", long]


async def test_limits_are_what_the_options_say(make_app: MakeApp, tokenizer: Tokenizer) -> None:
    limits = Limits(max_body_bytes=2000, max_choices=3, max_schema_bytes=1024)
    app, _ = make_app(say(tokenizer, "x"), ApiOptions(limits=limits))
    long = await post(app, "/v1/completions", COMPLETION | {"prompt": "x" * 2000})
    assert long.status_code == 413
    assert "--max-body" in long.json()["error"]["message"]
    assert (await post(app, "/v1/completions", COMPLETION | {"n": 3})).status_code == 200
    many = await post(app, "/v1/completions", COMPLETION | {"n": 4})
    assert "--max-choices" in many.json()["error"]["message"]
    form = {"type": "json_schema", "json_schema": {"schema": {"const": "x" * 1024}}}
    wide = await post(app, "/v1/completions", COMPLETION | {"response_format": form})
    assert "--max-schema" in wide.json()["error"]["message"]


async def test_a_schema_error_says_what_is_wrong(make_app: MakeApp, tokenizer: Tokenizer) -> None:
    app, _ = make_app(say(tokenizer, "x"))
    form = {
        "type": "json_schema",
        "json_schema": {"schema": {"type": "array", "uniqueItems": True}},
    }
    response = await post(app, "/v1/chat/completions", CHAT | {"response_format": form})
    assert "uniqueItems" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405), ("POST", "/v1/models", 405)],
)
async def test_unknown_routes_speak_openais_json(
    make_app: MakeApp, tokenizer: Tokenizer, method: str, path: str, status: int
) -> None:
    app, _ = make_app(say(tokenizer, "x"))
    async with client_of(app) as client:
        response = await client.request(method, path)
    assert response.status_code == status
    assert response.json()["error"]["message"]
