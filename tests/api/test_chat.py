"""/v1/chat/completions, /tokenize and /detokenize over a scripted engine, without sockets."""

from __future__ import annotations

from typing import Any

import pytest

from staffel.api.tokens import Tokenizer
from tests.api.conftest import MakeApp
from tests.api.doubles import CHAT, EOS, chat, post, say, stream

PATH = "/v1/chat/completions"
RENDERED = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    "<|im_start|>assistant\n"
)
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


async def test_a_chat(make_app: MakeApp, tokenizer: Tokenizer) -> None:
    app, engine = make_app(say(tokenizer, "Hello!"))
    answer = await chat(app, messages=MESSAGES)
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["system_fingerprint"].startswith("staffel-")
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello!", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert tokenizer.decode(engine.requests[0].prompt) == RENDERED
    assert answer["usage"]["prompt_tokens"] == len(engine.requests[0].prompt)
    assert engine.requests[0].params.max_tokens == 64 - len(engine.requests[0].prompt)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "developer", "content": "Be brief."}, MESSAGES[1]],
        [MESSAGES[0], {"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        [MESSAGES[0], MESSAGES[1] | {"name": "ann", "tool_calls": None, "refusal": None}],
    ],
)
async def test_other_ways_to_say_the_same(
    make_app: MakeApp, tokenizer: Tokenizer, messages: list[dict[str, Any]]
) -> None:
    app, engine = make_app(say(tokenizer, "x"))
    await chat(app, messages=messages)
    assert tokenizer.decode(engine.requests[0].prompt) == RENDERED


async def test_the_answer_goes_on_after_a_begun_message(
    make_app: MakeApp, tokenizer: Tokenizer
) -> None:
    app, engine = make_app(say(tokenizer, "x"))
    await chat(
        app,
        messages=[*MESSAGES, {"role": "assistant", "content": "Well,"}],
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert tokenizer.decode(engine.requests[0].prompt) == RENDERED + "Well,"


async def test_a_streamed_chat(make_app: MakeApp, tokenizer: Tokenizer) -> None:
    app, _ = make_app(say(tokenizer, "one 😀 two"))
    chunks = await stream(app, PATH, CHAT)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "one 😀 two"
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]


async def test_each_streamed_choice_begins_with_its_role(
    make_app: MakeApp, tokenizer: Tokenizer
) -> None:
    app, _ = make_app(say(tokenizer, "one two"))
    chunks = await stream(app, PATH, CHAT | {"n": 3})
    for index in range(3):
        deltas = [c["choices"][0]["delta"] for c in chunks if c["choices"][0]["index"] == index]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert "".join(delta.get("content", "") for delta in deltas[1:]) == "one two"
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_logprobs(make_app: MakeApp, tokenizer: Tokenizer) -> None:
    app, _ = make_app(say(tokenizer, "a😀"))
    answer = await chat(app, logprobs=True, top_logprobs=2)
    content = answer["choices"][0]["logprobs"]["content"]
    assert content[0]["token"] == "a"
    assert content[0]["bytes"] == [97]
    assert len(content[0]["top_logprobs"]) == 2
    assert content[0]["top_logprobs"][0] == {"token": "a", "logprob": -0.25, "bytes": [97]}
    assert bytes(byte for entry in content[1:-1] for byte in entry["bytes"]) == "😀".encode()
    assert content[1]["token"].startswith("\\xf0")
    assert content[-1]["token"] == "<|im_end|>"
    assert len(content) == answer["usage"]["completion_tokens"]


async def test_logprobs_without_top_ones(make_app: MakeApp, tokenizer: Tokenizer) -> None:
    app, engine = make_app(say(tokenizer, "a"))
    chunks = await stream(app, PATH, CHAT | {"logprobs": True})
    entries = [
        entry
        for chunk in chunks
        for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert [entry["token"] for entry in entries] == ["a", "<|im_end|>"]
    assert [entry["top_logprobs"] for entry in entries] == [[], []]
    assert engine.requests[0].params.logprobs == 0


async def test_token_ids(make_app: MakeApp, tokenizer: Tokenizer) -> None:
    app, engine = make_app(say(tokenizer, "one"))
    [one] = tokenizer.encode(["one"], add_special_tokens=False)[0]
    answer = await chat(app, return_token_ids=True)
    assert answer["prompt_token_ids"] == engine.requests[0].prompt
    assert answer["choices"][0]["token_ids"] == [one, EOS]
    chunks = await stream(app, PATH, CHAT | {"return_token_ids": True})
    assert chunks[0]["prompt_token_ids"] == engine.requests[0].prompt
    assert "prompt_token_ids" not in chunks[1]
    assert [id for chunk in chunks for id in chunk["choices"][0]["token_ids"]] == [one, EOS]


async def test_a_schema_becomes_a_grammar(make_app: MakeApp, tokenizer: Tokenizer) -> None:
    app, engine = make_app(say(tokenizer, '{"a":1}'))
    schema = {"type": "object", "properties": {"abc": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    await chat(app, response_format=form)
    assert '"abc"' in (engine.requests[0].params.grammar or "")
    await chat(app, response_format={"type": "text"})
    assert engine.requests[1].params.grammar is None


async def test_fields_that_ask_for_nothing_are_taken(
    make_app: MakeApp, tokenizer: Tokenizer
) -> None:
    app, _ = make_app(say(tokenizer, "x"))
    await chat(
        app,
        user="ann",
        metadata={"a": "b"},
        store=False,
        tools=[],
        tool_choice="none",
        parallel_tool_calls=True,
        service_tier="auto",
        modalities=["text"],
        best_of=1,
        functions=None,
        suffix=None,
        reasoning_effort=None,
        logit_bias=None,
        n=1,
        max_completion_tokens=3,
        chat_template_kwargs={"enable_thinking": False},
    )


async def test_tokenize_and_back(make_app: MakeApp, tokenizer: Tokenizer) -> None:
    app, _ = make_app(say(tokenizer, "x"))
    answer = (await post(app, "/tokenize", {"model": "tiny", "prompt": "one two"})).json()
    assert answer == {
        "count": 2,
        "max_model_len": 64,
        "tokens": tokenizer.encode(["one two"], add_special_tokens=True)[0],
        "token_strs": None,
    }
    back = await post(app, "/detokenize", {"tokens": answer["tokens"]})
    assert back.json() == {"prompt": "one two"}


async def test_tokenize_messages(make_app: MakeApp, tokenizer: Tokenizer) -> None:
    app, _ = make_app(say(tokenizer, "x"))
    body = {"messages": MESSAGES, "return_token_strs": True}
    answer = (await post(app, "/tokenize", body)).json()
    assert tokenizer.decode(answer["tokens"]) == RENDERED
    assert answer["token_strs"][0] == "<|im_start|>"
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
