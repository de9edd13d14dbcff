"""Draws depend on the seed, the choice and the position, and on nothing else."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.server import MODEL, Server

pytestmark = pytest.mark.e2e

PROMPT = "Once upon a time there was a"
SEEDS = (1, 7, 42)


def draw(server: Server, seed: int | None, n: int = 1) -> list[list[int]]:
    """The token ids of each choice."""
    answer = server.client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        seed=seed,
        n=n,
        temperature=0.9,
        top_p=0.95,
        max_tokens=12,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    return [choice.model_extra["token_ids"] for choice in answer.choices]  # type: ignore[index]


@pytest.fixture(scope="module")
def alone(disaggregated: Server) -> dict[int, list[int]]:
    """What each seed draws with nothing else running."""
    return {seed: draw(disaggregated, seed)[0] for seed in SEEDS}


def test_seeds_differ(alone: dict[int, list[int]]) -> None:
    assert len({tuple(ids) for ids in alone.values()}) == len(SEEDS)
    assert all(len(ids) == 12 for ids in alone.values())


def test_alone_and_in_a_batch(either: Server, alone: dict[int, list[int]]) -> None:
    wanted = [*SEEDS, 100, 101, 102, 103, 104]
    with ThreadPoolExecutor(len(wanted)) as pool:
        drawn = dict(zip(wanted, pool.map(lambda s: draw(either, s)[0], wanted), strict=True))
    assert {seed: drawn[seed] for seed in SEEDS} == alone


def test_colocated_alone(colocated: Server, alone: dict[int, list[int]]) -> None:
    assert {seed: draw(colocated, seed)[0] for seed in SEEDS} == alone


def test_choices_differ_and_the_first_is_the_only_one(
    either: Server, alone: dict[int, list[int]]
) -> None:
    choices = draw(either, SEEDS[0], n=4)
    assert len({tuple(ids) for ids in choices}) == 4
    assert choices[0] == alone[SEEDS[0]]


def test_without_a_seed_repeats_differ(disaggregated: Server) -> None:
    assert draw(disaggregated, None) != draw(disaggregated, None)
