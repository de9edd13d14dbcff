"""Batch policies: how a step is shared between running sequences and prompts."""

from __future__ import annotations

from typing import NamedTuple

from staffel.control.messages import EngineConfig


class Share(NamedTuple):
    """What a step may do."""

    decode: bool
    """Whether the running sequences get a token each."""
    prompt_tokens: int
    """Most prompt tokens."""


def share(config: EngineConfig, decoding: int, prompts_ready: bool) -> Share:
    """The policy of the instance's role.

    A prefill instance has nothing to decode, a decode instance few or no prompts, so both follow
    the chunked policy.
    """
    if config.role == "colocated" and config.policy == "prefill-first":
        return _prefill_first(config, decoding, prompts_ready)
    return _chunked(config, decoding)


def _chunked(config: EngineConfig, decoding: int) -> Share:
    """Decode first, and fill the step up with prompts (Sarathi-Serve, OSDI 2024).

    Prompts get at least a block's worth: a full decode batch must not starve them for good.
    """
    return Share(True, max(config.chunk_tokens - decoding, config.block_size))


def _prefill_first(config: EngineConfig, decoding: int, prompts_ready: bool) -> Share:
    """Prompts alone as long as there are any that fit (Orca's and early vLLM's order)."""
    return Share(not prompts_ready, config.chunk_tokens)
