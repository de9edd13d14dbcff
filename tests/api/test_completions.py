"""/v1/completions over a scripted engine, without sockets."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from staffel.api.serving import ApiOptions
from staffel.api.tokens import Tokenizer
from staffel.control.request import Request, SamplingParams
from tests.api.conftest import MakeApp
from tests.api.doubles import COMPLETION, EOS, complete, deltas, say, stream

PATH = "/v1/completions"


async def test_a_completion(make_app: MakeApp, tokenizer: Tokenizer) -> None:
    app, engine = make_app(say(tokenizer, "one two", cached=1))
    answer = await complete(app)
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["model"] == "tiny"
    assert answer["choices"] == [
        {
            "index": 0,
            "text": "one two",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": 1,
        "completion_tokens": 3,
        "total_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert engine.cancelled == {}


async def test_what_the_engine_is_asked_by_default(make_app: MakeApp, tokenizer: Tokenizer) -> None:
    app, engine = make_app(say(tokenizer, "x"))
    await complete(app, prompt="one two", temperature=None, seed=None, stop=None)
    [request] = engine.requests
    assert request.prompt == tokenizer.encode(["one two"], add_special_tokens=True)[0]
    assert request.use_cache
    assert request.params == SamplingParams(
        max_tokens=62, stop_ids=(EOS,), seed=request.params.seed
    )


async def test_every_parameter_reaches_the_engine(make_app: MakeApp, tokenizer: Tokenizer) -> None:
    app, engine = make_app(say(tokenizer, "x"))
    await complete(
        app,
        max_tokens=9,
        min_tokens=1,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        seed=-1,
        stop_token_ids=[7, EOS],
        presence_penalty=0.1,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        logit_bias={"5": -100},
        logprobs=3,
        response_format={"type": "json_object"},
    )
    params = engine.requests[0].params
    grammar = params.grammar
    assert grammar is not None
    assert "whitespace_flexible" in grammar
    assert params == SamplingParams(
        max_tokens=9,
        min_tokens=1,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        seed=2**64 - 1,
        stop_ids=(EOS, 7),
        presence_penalty=0.1,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        logit_bias={5: -100.0},
        logprobs=3,
        grammar=grammar,
    )


async def test_ignore_eos_leaves_the_clients_own_stop_ids(
    make_app: MakeApp, tokenizer: Tokenizer
) -> None:
    app, engine = make_app(say(tokenizer, "x"))
    await complete(app, ignore_eos=True, stop_token_ids=[7], top_k=-1)
    assert engine.requests[0].params.stop_ids == (7,)
    assert engine.requests[0].params.top_k == 0


@pytest.mark.parametrize(
    "prompt", ["one two", ["one two"], [8, 9], [[8, 9]], ["a", "b"], [[8], [9, 10]]]
)
async def test_all_forms_of_a_prompt(
    make_app: MakeApp, tokenizer: Tokenizer, prompt: str | list[str] | list[int] | list[list[int]]
) -> None:
    app, engine = make_app(say(tokenizer, "x"))
    answer = await complete(app, prompt=prompt)
    count = 2 if prompt in (["a", "b"], [[8], [9, 10]]) else 1
    assert [choice["index"] for choice in answer["choices"]] == list(range(count))
    if prompt in ([8, 9], [[8, 9]]):
        assert engine.requests[0].prompt == [8, 9]
    if count == 1:
        assert len(engine.requests[0].prompt) == 2


async def test_choices_of_several_prompts(make_app: MakeApp, tokenizer: Tokenizer) -> None:
    app, engine = make_app(
        lambda request: deltas(request, [100 + request.params.choice, EOS], cached=1)
    )
    answer = await complete(app, prompt=[[8, 9], [10]], n=2, seed=5)
    texts = [tokenizer.decode([100]), tokenizer.decode([101])]
    assert [choice["text"] for choice in answer["choices"]] == texts * 2
    assert [request.prompt for request in engine.requests] == [[8, 9], [8, 9], [10], [10]]
    assert len({request.id for request in engine.requests}) == 4
    assert {request.params.seed for request in engine.requests} == {5}
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 2


async def test_seeds_of_requests_without_one_differ_and_repeat_with_the_servers(
    make_app: MakeApp, tokenizer: Tokenizer
) -> None:
    seeds = []
    for _ in range(2):
        app, engine = make_app(say(tokenizer, "x"), ApiOptions(seed=3))
        await complete(app)
        await complete(app)
        seeds.append([request.params.seed for request in engine.requests])
    assert seeds[0] == seeds[1]
    assert seeds[0][0] != seeds[0][1]


async def test_streamed_text_is_the_text(make_app: MakeApp, tokenizer: Tokenizer) -> None:
    text = "Grüße 😀 日本語, one two"
    app, _ = make_app(say(tokenizer, text))
    chunks = await stream(app, PATH, COMPLETION)
    parts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert "".join(parts) == text
    assert all(parts[:-1])
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(parts)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[-2:]] == [None, "stop"]
    assert all("usage" not in chunk for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_usage_in_a_stream(make_app: MakeApp, tokenizer: Tokenizer) -> None:
    app, _ = make_app(say(tokenizer, "one two", cached=1))
    *chunks, last = await stream(
        app, PATH, COMPLETION | {"stream_options": {"include_usage": True}}
    )
    assert [chunk["usage"] for chunk in chunks] == [None] * 3
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


async def test_running_usage_in_a_stream(make_app: MakeApp, tokenizer: Tokenizer) -> None:
    app, _ = make_app(say(tokenizer, "a😀"))
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await stream(app, PATH, COMPLETION | {"stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == [*range(1, len(chunks)), len(chunks) - 1]


@pytest.mark.parametrize("group", [1, 99])
async def test_a_stop_string_ends_the_request_on_the_engine(
    make_app: MakeApp, tokenizer: Tokenizer, group: int
) -> None:
    def script(request):  # type: ignore[no-untyped-def]
        [ids] = tokenizer.encode(["one two three four"], add_special_tokens=False)
        return [*deltas(request, ids, None, group=group), None]

    app, engine = make_app(script)
    answer = await complete(app, stop=["o th", "zzz"], logprobs=0, return_token_ids=True)
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (
        "one tw", "stop", "o th",
    )  # fmt: skip
    assert len(choice["token_ids"]) == len(choice["logprobs"]["tokens"]) == 3
    assert answer["usage"]["completion_tokens"] == 3
    assert list(engine.cancelled) == [engine.requests[0].id]


async def test_one_choices_stop_string_leaves_the_others(
    make_app: MakeApp, tokenizer: Tokenizer
) -> None:
    def script(request):  # type: ignore[no-untyped-def]
        [ids] = tokenizer.encode(["one two three"], add_special_tokens=False)
        if request.params.choice == 0:
            return [*deltas(request, ids, None), None]
        return deltas(request, [*ids[:1], EOS])

    app, engine = make_app(script)
    chunks = await stream(app, PATH, COMPLETION | {"n": 2, "stop": " two"})
    texts = ["", ""]
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == ["one", "one"]
    assert list(engine.cancelled) == [engine.requests[0].id]


async def test_logprobs(make_app: MakeApp, tokenizer: Tokenizer) -> None:
    app, _ = make_app(say(tokenizer, "one two"))
    logprobs = (await complete(app, logprobs=2))["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["one", " two", "<|im_end|>"]
    assert logprobs["token_logprobs"] == [-0.25] * 3
    assert logprobs["text_offset"] == [0, 3, 7]
    assert [len(top) for top in logprobs["top_logprobs"]] == [2, 2, 2]
    assert logprobs["top_logprobs"][1][" two"] == -0.25


async def test_logprobs_of_half_a_character(make_app: MakeApp, tokenizer: Tokenizer) -> None:
    app, _ = make_app(say(tokenizer, "😀", "length"))
    logprobs = (await complete(app, logprobs=0))["choices"][0]["logprobs"]
    assert all(token.startswith("bytes:\\x") for token in logprobs["tokens"])
    assert len(set(logprobs["tokens"])) == len(logprobs["tokens"])
    assert set(logprobs["text_offset"]) == {0}


async def test_streamed_logprobs_are_the_same(make_app: MakeApp, tokenizer: Tokenizer) -> None:
    app, _ = make_app(say(tokenizer, "one 😀 two"))
    fields = {"logprobs": 1, "stop": "wo three"}
    whole = (await complete(app, **fields))["choices"][0]["logprobs"]
    chunks = await stream(app, PATH, COMPLETION | fields)
    for key, entries in whole.items():
        streamed = [entry for chunk in chunks for entry in chunk["choices"][0]["logprobs"][key]]
        assert streamed == entries


@pytest.mark.parametrize("prompt", ["one two", [8, 9]])
async def test_echo(make_app: MakeApp, tokenizer: Tokenizer, prompt: str | list[int]) -> None:
    app, engine = make_app(say(tokenizer, " three"))
    answer = await complete(app, prompt=prompt, echo=True)
    before = prompt if isinstance(prompt, str) else tokenizer.decode(prompt)
    assert answer["choices"][0]["text"] == before + " three"
    assert engine.requests[0].params.prompt_logprobs is None
    chunks = await stream(app, PATH, {"prompt": prompt, "echo": True})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == before + " three"


async def test_echo_with_logprobs_tells_those_of_the_prompt(
    make_app: MakeApp, tokenizer: Tokenizer
) -> None:
    app, engine = make_app(say(tokenizer, " three"))
    fields = {"prompt": "one two", "echo": True, "logprobs": 1}
    logprobs = (await complete(app, **fields))["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["one", " two", " three", "<|im_end|>"]
    assert logprobs["token_logprobs"] == [None, -0.25, -0.25, -0.25]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["text_offset"] == [0, 3, 7, 13]
    assert not engine.requests[0].use_cache
    assert engine.requests[0].params.prompt_logprobs == 1


@pytest.mark.parametrize("given", [None, []])
@pytest.mark.parametrize("max_tokens", [0, 2])
async def test_echo_with_logprobs_of_a_prompt_of_one_token(
    make_app: MakeApp, given: list[Any] | None, max_tokens: int
) -> None:
    """Engines say None or nothing of it, as it has no token to be likely after."""

    def script(request: Request) -> list[Any]:
        return [
            structs.replace(one, prompt_logprobs=given)
            for one in deltas(request, [100, 101][:max_tokens], "length", group=2)
        ]

    app, _ = make_app(script)
    answer = await complete(app, prompt="Two", echo=True, logprobs=1, max_tokens=max_tokens)
    logprobs = answer["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == 1 + max_tokens
    assert logprobs["tokens"][0] == "Two"
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["text_offset"][:2] == [0, 3][: 1 + max_tokens]


async def test_echo_of_the_prompt_alone(make_app: MakeApp, tokenizer: Tokenizer) -> None:
    app, _ = make_app(lambda request: deltas(request, [], "length"))
    answer = await complete(app, prompt="one two", echo=True, logprobs=1, max_tokens=0)
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("one two", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -0.25]
    assert answer["usage"]["completion_tokens"] == 0


async def test_token_ids(make_app: MakeApp, tokenizer: Tokenizer) -> None:
    app, _ = make_app(say(tokenizer, "one"))
    [one] = tokenizer.encode(["one"], add_special_tokens=False)[0]
    fields = {"prompt": [8, 9], "return_token_ids": True}
    [choice] = (await complete(app, **fields))["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([8, 9], [one, EOS])
    first, second = await stream(app, PATH, fields)
    assert first["choices"][0]["prompt_token_ids"] == [8, 9]
    assert "prompt_token_ids" not in second["choices"][0]
    assert [part["choices"][0]["token_ids"] for part in (first, second)] == [[one], [EOS]]
