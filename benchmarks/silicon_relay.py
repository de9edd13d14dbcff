"""Prefill and decode apart, at a fixed number of clients: mean-value analysis of a closed queue.

The prefill workers are a station where requests queue, the decode workers one where all are served
at once, the slower the more there are (Schweitzer's approximation for closed networks; Lazowska et
al., Quantitative System Performance, 1984, chapter 6)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

DAMPING = 0.5
ROUNDS = 200


class Relay(NamedTuple):
    """Steady state of the closed loop; seconds."""

    wait_and_prefill: float
    tpot: float


def steady_state(
    clients: int,
    prefill_s: float,
    prefill_workers: int,
    output_tokens: int,
    decode_s: Callable[[float], float],
    decode_workers: int,
) -> Relay:
    """
    Args:
        prefill_s: one prompt alone, on one worker.
        decode_s: a decode step's seconds from the sequences in it.
    """
    at_prefill, tpot = clients / 2, decode_s(1)
    wait = prefill_s
    for _ in range(ROUNDS):
        others = at_prefill * (clients - 1) / clients
        queued = max(0.0, others - (prefill_workers - 1))
        wait = prefill_s * (1 + queued / prefill_workers)
        decoding = (clients - at_prefill) / decode_workers
        tpot = decode_s(max(1.0, decoding))
        cycle = wait + (output_tokens - 1) * tpot
        at_prefill += DAMPING * (clients * wait / cycle - at_prefill)
    return Relay(wait, tpot)
