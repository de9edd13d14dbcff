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


def test_cached_tokens_are_those_of_the_prefill_side(disaggregated: Server) -> None:
    """A repeated prompt is found in the prefill instance's cache; a new one is not."""
    prompt = "Seven brave sailors crossed the frozen northern sea in a boat made of paper. " * 3

    def cached() -> int | None:
        answer = disaggregated.client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=2, temperature=0
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens

    assert cached() == 0
    again = cached()
    assert again is not None
    assert again >= 32
    assert again % 16 == 0
