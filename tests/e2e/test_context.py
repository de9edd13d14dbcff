"""The shortest and the longest prompt."""

from __future__ import annotations

import openai
import pytest

from tests.e2e.server import MODEL, Server

pytestmark = pytest.mark.e2e

OUTPUT = 3


def length_limit(server: Server) -> int:
    [card] = server.client.models.list().data
    return int(card.model_extra["max_model_len"])  # type: ignore[index]


def complete(server: Server, prompt: list[int]) -> tuple[int, int]:
    """Prompt tokens and output tokens."""
    answer = server.client.completions.create(
        model=MODEL,
        prompt=prompt,
        max_tokens=OUTPUT,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert answer.usage is not None
    return answer.usage.prompt_tokens, answer.usage.completion_tokens


def test_one_token(either: Server) -> None:
    assert complete(either, [504]) == (1, OUTPUT)


def test_up_to_the_last_position(either: Server) -> None:
    longest = length_limit(either) - OUTPUT
    words = [500 + position % 1009 for position in range(longest)]
    assert complete(either, words) == (longest, OUTPUT)
    with pytest.raises(openai.BadRequestError) as refused:
        complete(either, [*words, 500])
    assert refused.value.code == "context_length_exceeded"
    assert either.quiet
