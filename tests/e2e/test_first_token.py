"""All that is evaluated on a token is evaluated on the first one, which prefill draws."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
from openai.types import CompletionUsage

from tests.e2e.server import MODEL, Server

pytestmark = pytest.mark.e2e

EOS = 2  # <|im_end|>
QUESTION = "What is the capital of France?"  # "The capital of France is Paris."
ROCKET = "\N{ROCKET}"  # three tokens


@dataclass(frozen=True)
class Answer:
    text: str
    finish: str | None
    usage: CompletionUsage | None
    pieces: list[str]


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def streamed(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def ask(server: Server, streamed: bool, **more: Any) -> Answer:
    """A greedy chat completion."""
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 12,
    } | more
    if not streamed:
        whole = server.client.chat.completions.create(**body)
        text = whole.choices[0].message.content or ""
        return Answer(text, whole.choices[0].finish_reason, whole.usage, [text])
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(server.client.chat.completions.create(**body))
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    pieces = [choice.delta.content or "" for choice in choices]
    [finish] = [choice.finish_reason for choice in choices if choice.finish_reason]
    return Answer("".join(pieces), finish, chunks[-1].usage, pieces)


def count(answer: Answer) -> int:
    assert answer.usage is not None
    return answer.usage.completion_tokens


def test_one_token(either: Server, streamed: bool) -> None:
    answer = ask(either, streamed, max_tokens=1)
    assert (answer.text, answer.finish, count(answer)) == ("The", "length", 1)


def test_end_of_sequence(either: Server, streamed: bool) -> None:
    answer = ask(either, streamed, logit_bias={str(EOS): 100})
    assert (answer.text, answer.finish, count(answer)) == ("", "stop", 1)


def test_stop_id(either: Server, streamed: bool) -> None:
    [the] = either.http.post(
        "/tokenize", json={"prompt": "The", "add_special_tokens": False}
    ).json()["tokens"]
    answer = ask(either, streamed, extra_body={"stop_token_ids": [the]})
    assert answer.finish == "stop"
    assert count(answer) == 1


def test_stop_string(either: Server, streamed: bool) -> None:
    answer = ask(either, streamed, stop=["The"])
    assert (answer.text, answer.finish) == ("", "stop")


def test_stop_string_over_the_boundary(either: Server, streamed: bool) -> None:
    answer = ask(either, streamed, stop=["e cap"])
    assert (answer.text, answer.finish) == ("Th", "stop")
    assert not any("e" in piece for piece in answer.pieces)


def test_min_tokens(either: Server, streamed: bool) -> None:
    answer = ask(either, streamed, logit_bias={str(EOS): 100}, extra_body={"min_tokens": 3})
    assert (answer.text, answer.finish, count(answer)) == ("The capital of", "stop", 4)


def test_a_character_in_several_tokens(either: Server, streamed: bool) -> None:
    """The model goes on with rockets. No piece holds a part of one."""
    body: dict[str, Any] = {
        "model": MODEL, "prompt": ROCKET * 12, "temperature": 0, "max_tokens": 6,
    }  # fmt: skip
    made = either.client.completions.create(**body, stream=streamed)
    pieces = [item.choices[0].text for item in (made if streamed else [made])]
    assert "".join(pieces) == ROCKET * 2
    assert all(set(piece) <= {ROCKET} for piece in pieces)


def test_logprobs_of_chat(either: Server) -> None:
    answer = either.client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": QUESTION}],
        temperature=0,
        max_tokens=4,
        logprobs=True,
        top_logprobs=2,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(entry.token for entry in logprobs.content) == "The capital of France"
    assert all(entry.top_logprobs[0].token == entry.token for entry in logprobs.content)


def test_logprobs_of_completion_stream(either: Server) -> None:
    chunks = either.client.completions.create(
        model=MODEL, prompt="One two three", temperature=0, max_tokens=3, logprobs=1, stream=True
    )
    tokens = [
        token
        for chunk in chunks
        if chunk.choices and chunk.choices[0].logprobs
        for token in chunk.choices[0].logprobs.tokens or []
    ]
    assert len(tokens) == 3


def test_json_schema(either: Server, streamed: bool) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "big": {"type": "boolean"}},
        "required": ["city", "big"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    answer = ask(either, streamed, response_format=form, max_tokens=40)
    parsed = json.loads(answer.text)
    assert parsed["city"] in ("Paris", "Rome")
    assert isinstance(parsed["big"], bool)
    assert answer.finish == "stop"


def test_four_choices(either: Server) -> None:
    answer = either.client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Invent a name for a cat."}],
        n=4,
        seed=3,
        max_tokens=8,
    )
    assert sorted(choice.index for choice in answer.choices) == [0, 1, 2, 3]
    assert len({choice.message.content for choice in answer.choices}) == 4
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 32
