"""Batch policies: how a step is shared between running sequences and prompts."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from staffel.control.messages import EngineConfig


class Share(NamedTuple):
    """What a step may do."""

    decode: bool
    """Whether the running sequences get a token each."""
    prompt_tokens: int
    """Most prompt tokens."""


def share(config: EngineConfig, decoding: int, prompts_ready: Callable[[], bool]) -> Share:
    """The policy of the instance's role, for a step with `decoding` running sequences.

    A prefill instance has nothing to decode, a decode instance few or no prompts, so both follow
    the chunked policy.
    """
    if config.role == "colocated" and config.policy == "prefill-first":
        return _prefill_first(config, prompts_ready)
    return _chunked(config, decoding)


def _chunked(config: EngineConfig, decoding: int) -> Share:
    """Decode first, and fill the step up with prompts (Sarathi-Serve, OSDI 2024).

    Prompts get a block's worth at least: a full decode batch must not starve them for good.
    """
    least = min(config.block_size, config.chunk_tokens)
    return Share(True, max(config.chunk_tokens - decoding, least))


def _prefill_first(config: EngineConfig, prompts_ready: Callable[[], bool]) -> Share:
    """Prompts alone as long as there are any that fit (Orca's and early vLLM's order)."""
    return Share(not prompts_ready(), config.chunk_tokens)
