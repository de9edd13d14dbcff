"""The same answers whatever the placement, and a prefill instance that takes part.

Placements with several instances of a phase are in `test_several_instances`.
"""

from __future__ import annotations

import pytest

from tests.e2e.answers import check_answers
from tests.e2e.conftest import SMALL, MakeServer
from tests.e2e.server import MODEL, Server

pytestmark = pytest.mark.e2e


def test_paris(disaggregated: Server) -> None:
    assert "Paris" in disaggregated.greedy("What is the capital of France?")


def test_one_of_each(disaggregated: Server, expected: dict[str, str]) -> None:
    check_answers(disaggregated, expected)


def test_colocated_chunked(colocated: Server, expected: dict[str, str]) -> None:
    check_answers(colocated, expected)


def test_colocated_prefill_first(make_server: MakeServer, expected: dict[str, str]) -> None:
    with make_server("--colocated", "1", "--policy", "prefill-first", *SMALL) as server:
        check_answers(server, expected)


def cached_tokens(server: Server, prompt: str) -> int:
    answer = server.client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=2, temperature=0
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    cached = answer.usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    return cached


LONG = "Seven brave sailors crossed the frozen northern sea in a boat made of paper. " * 3


def test_cached_tokens_are_those_of_the_prefill_side(disaggregated: Server) -> None:
    """A repeated prompt is found in the prefill instance's cache; a new one is not."""
    assert cached_tokens(disaggregated, LONG) == 0
    again = cached_tokens(disaggregated, LONG)
    assert again >= 32
    assert again % 16 == 0


def test_without_a_prefix_cache_prompts_are_computed_again(make_server: MakeServer) -> None:
    with make_server("--colocated", "1", "--no-prefix-cache", *SMALL) as server:
        assert [cached_tokens(server, LONG) for _ in range(2)] == [0, 0]
