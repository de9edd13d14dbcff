"""What a batch costs: the work that its time depends on, and models of that time."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

import msgspec

from staffel.config import ConfigError


def pairs(new: int, cached: int = 0) -> int:
    """(new token, key that it sees) pairs of `new` prompt tokens after `cached` ones: causal."""
    return new * cached + new * (new + 1) // 2


class Work(NamedTuple):
    """What one batch computes, as far as its time depends on it."""

    prompt_tokens: int = 0
    """New tokens of prompts."""
    prompt_pairs: int = 0
    """Sum over prompt chunks of `pairs(new, cached)`."""
    prompts: int = 0
    """Prompt chunks."""
    decodes: int = 0
    """Sequences that decode, one token each."""
    decode_context: int = 0
    """Sum over decoding sequences of the keys that they see."""

    @classmethod
    def prefill(cls, new: int, cached: int = 0, prompts: int = 1) -> Work:
        """`prompts` like chunks of `new` tokens, each after `cached` tokens."""
        return cls(new * prompts, pairs(new, cached) * prompts, prompts)

    @classmethod
    def decode(cls, sequences: int, context: int) -> Work:
        """`sequences` that decode, each seeing `context` keys."""
        return cls(decodes=sequences, decode_context=sequences * context)


Phase = Literal["prefill", "decode", "mixed"]


def phase_of(work: Work) -> Phase:
    """Which of a `FittedModel`'s regimes the batch belongs to."""
    if not work.decodes:
        return "prefill"
    return "mixed" if work.prompts else "decode"


class LatencyModel(Protocol):
    """Whoever knows what a batch costs."""

    def step_seconds(self, work: Work) -> float:
        """Seconds of one step of the whole model, all pipeline stages together."""
        ...


class Regime(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Seconds, linear in the work, for batches of at most `up_to` tokens (None: of any size)."""

    up_to: int | None = None
    constant: float = 0.0
    per_prompt_token: float = 0.0
    per_prompt_pair: float = 0.0
    per_prompt: float = 0.0
    per_decode: float = 0.0
    per_decode_context: float = 0.0

    def seconds(self, work: Work) -> float:
        return (
            self.constant
            + self.per_prompt_token * work.prompt_tokens
            + self.per_prompt_pair * work.prompt_pairs
            + self.per_prompt * work.prompts
            + self.per_decode * work.decodes
            + self.per_decode_context * work.decode_context
        )


class FittedModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Linear regimes by phase, in the order of `up_to`; the last one has none.

    A batch's size is its tokens: a prompt's count one each, a decoding sequence counts one.
    """

    prefill: tuple[Regime, ...]
    decode: tuple[Regime, ...]
    mixed: tuple[Regime, ...]
    """Batches with prompts and decoding sequences."""

    def __post_init__(self) -> None:
        for phase in ("prefill", "decode", "mixed"):
            _check_regimes(phase, getattr(self, phase))

    def step_seconds(self, work: Work) -> float:
        if not work.decodes:
            regimes = self.prefill
        elif not work.prompts:
            regimes = self.decode
        else:
            regimes = self.mixed
        if len(regimes) == 1:
            return regimes[0].seconds(work)
        return regime_of(regimes, work.prompt_tokens + work.decodes).seconds(work)


def regime_of(regimes: tuple[Regime, ...], tokens: int) -> Regime:
    """The one that a batch of `tokens` belongs to."""
    for regime in regimes:
        if regime.up_to is None or tokens <= regime.up_to:
            return regime
    raise AssertionError("the last regime has no bound")


def _check_regimes(phase: str, regimes: tuple[Regime, ...]) -> None:
    bounds = [regime.up_to for regime in regimes]
    if not bounds or bounds[-1] is not None or None in bounds[:-1]:
        raise ConfigError(f"{phase}: all regimes but the last need up_to, and the last has none")
    limits = [bound for bound in bounds if bound is not None]
    if limits != sorted(set(limits)):
        raise ConfigError(f"{phase}: regimes must be in the order of up_to")
