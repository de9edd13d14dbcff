"""The closed loops of benchmarks/silicon.py, on cases that can be worked out by hand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from staffel.latency.model import Work

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
silicon_loop = pytest.importorskip("silicon_loop")
silicon_relay = pytest.importorskip("silicon_relay")

PREFILL, DECODE = 1e-3, 10e-3
"""Seconds of a prompt token, and of a decode step."""


class Linear:
    """Prompt tokens and a decode step cost what they cost alone."""

    def step_seconds(self, work: Work) -> float:
        return PREFILL * work.prompt_tokens + (DECODE if work.decodes else 0.0)


def means(
    *,
    clients: int,
    prompt: int = 10,
    output: int = 101,
    kv_tokens: int = 10**9,
    rounds: int = 20,
    **engine: Any,
) -> tuple[float, float]:
    """(TTFT, TPOT) after the first round."""
    made = silicon_loop.Engine(**{"policy": "chunked", **engine})
    load = silicon_loop.Load(
        clients=clients, prompt_tokens=prompt, output_tokens=output, rounds=rounds
    )
    times = silicon_loop.Loop(Linear(), made, load, kv_tokens).run()
    ttft, tpot = np.array(times)[clients:].mean(axis=0)
    return float(ttft), float(tpot)


@pytest.mark.parametrize("policy", ["chunked", "whole", "prefill-first"])
def test_one_client_waits_for_nobody(policy: str) -> None:
    assert means(clients=1, policy=policy) == pytest.approx((10 * PREFILL, DECODE))


def test_equal_requests_that_start_together_stay_together() -> None:
    ttft, tpot = means(clients=4, policy="prefill-first")
    assert (ttft, tpot) == pytest.approx((40 * PREFILL, DECODE))


def test_a_small_budget_splits_the_prompts_in_chunks() -> None:
    ttft, _ = means(clients=1, prompt=1000, budget=100)
    assert ttft == pytest.approx(1000 * PREFILL)
    together, _ = means(clients=4, prompt=100, budget=100, policy="prefill-first")
    assert together == pytest.approx(np.mean([100, 200, 300, 400]) * PREFILL)


def test_with_a_slot_lost_the_cycle_is_longer_by_its_share() -> None:
    ttft, tpot = means(clients=5, slots_lost=1, rounds=60)
    four_together = 40 * PREFILL + 100 * DECODE
    assert ttft + 100 * tpot == pytest.approx(5 / 4 * four_together, rel=0.01)


def test_memory_for_half_the_clients_makes_the_others_wait_a_whole_request() -> None:
    ttft, tpot = means(clients=4, kv_tokens=2 * 111, rounds=60)
    assert ttft == pytest.approx(100 * tpot, rel=0.1)


def test_a_slow_answering_process_sets_the_throughput() -> None:
    each = DECODE / 2
    ttft, tpot = means(clients=4, answer_s=each, rounds=60)
    cycle = ttft + 100 * tpot
    assert 4 * 101 / cycle == pytest.approx(1 / each, rel=0.02)


def test_a_relay_with_few_clients_waits_for_nobody() -> None:
    found = silicon_relay.steady_state(1, 0.1, 1, 101, lambda count: DECODE, 1)
    assert found == pytest.approx((0.1, DECODE))


def test_a_relay_with_many_clients_goes_at_the_pace_of_its_prefill() -> None:
    found = silicon_relay.steady_state(100, 0.1, 2, 101, lambda count: DECODE, 1)
    assert 100 / (found.wait_and_prefill + 100 * found.tpot) == pytest.approx(20, rel=0.03)


def test_a_relay_spreads_its_sequences_over_the_decode_workers() -> None:
    one, two = (
        silicon_relay.steady_state(64, 1e-4, 1, 1001, lambda count: 1e-4 * count, workers)
        for workers in (1, 2)
    )
    assert two.tpot == pytest.approx(one.tpot / 2, rel=0.05)
