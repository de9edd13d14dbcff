"""The same answers whatever the placement, and a prefill instance that takes part."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.conftest import SMALL, MakeServer
from tests.e2e.server import MODEL, Server

pytestmark = pytest.mark.e2e

QUESTIONS = [
    "What is the capital of France?",
    "What is the capital of Germany?",
    "Name three colors.",
    "How many days are in a week?",
    "Count from one to five.",
    "What is the opposite of hot?",
]

PLACEMENTS = {
    "prefill-first": ("--colocated", "1", "--policy", "prefill-first"),
    "2P1D": ("--prefill", "2", "--decode", "1"),
    "1P2D": ("--prefill", "1", "--decode", "2"),
}


@pytest.fixture(scope="module", params=["1P1D", "chunked", *PLACEMENTS])
def placed(request: pytest.FixtureRequest, make_server: MakeServer) -> Iterator[Server]:
    shared = {"1P1D": "disaggregated", "chunked": "colocated"}.get(request.param)
    if shared is not None:
        yield request.getfixturevalue(shared)
        return
    with make_server(*PLACEMENTS[request.param], *SMALL) as server:
        yield server


@pytest.fixture(scope="module")
def expected(disaggregated: Server) -> dict[str, str]:
    """Each question's answer, asked alone."""
    return {question: disaggregated.greedy(question) for question in QUESTIONS}


def test_paris(disaggregated: Server) -> None:
    assert "Paris" in disaggregated.greedy("What is the capital of France?")


def test_same_text_together_and_streamed(placed: Server, expected: dict[str, str]) -> None:
    before = placed.instances()
    with ThreadPoolExecutor(2 * len(QUESTIONS)) as pool:
        whole = pool.map(placed.greedy, QUESTIONS)
        streamed = pool.map(lambda question: _streamed(placed, question), QUESTIONS)
        assert dict(zip(QUESTIONS, whole, strict=True)) == expected
        assert dict(zip(QUESTIONS, streamed, strict=True)) == expected
    _check_who_worked(before, placed, 2 * len(QUESTIONS))


def _streamed(server: Server, question: str) -> str:
    chunks = server.client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=16,
        stream=True,
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def _check_who_worked(before: dict[str, object], server: Server, requests: int) -> None:
    """Every instance took part, and each phase saw every request."""
    now = server.instances()
    counts = {
        name: state.started - getattr(before[name], "started", 0) for name, state in now.items()
    }
    assert all(counts.values()), counts
    for role in {name.rpartition("-")[0] for name in now}:
        of_role = sum(count for name, count in counts.items() if name.startswith(role))
        assert of_role == requests, counts


def test_unstreamed_usage_counts_the_prefill_side(disaggregated: Server) -> None:
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
