"""Grammars that constrain the output, through llguidance.

A grammar travels as text. What may come next is a pure function of that text and of the output
ids, so a matcher is rebuilt from ids wherever a sequence goes on.
"""

from __future__ import annotations

import logging
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from staffel.config import ConfigError

log = logging.getLogger(__name__)

_KEPT_GRAMMARS = 64
"""Compiling one can take longer than a step; the choices of a request share theirs."""


class Grammars:
    """Makes matchers for one model. The tokenizer is read when the first is asked for."""

    def __init__(self, model_path: Path, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        """`vocab_size` is the logits' width, which may differ from the tokenizer's."""
        self._file = model_path / "tokenizer.json"
        self._vocab_size = vocab_size
        self._eos_ids = list(eos_ids)
        self._compiled = lru_cache(_KEPT_GRAMMARS)(self._compile)

    def matcher(self, grammar: str) -> Matcher:
        """A matcher at the start of `grammar`, llguidance's grammar text.

        The API has validated it; one that fails all the same has ended before it began, since
        one request must not take an instance down.

        Raises:
            ConfigError: the model has no tokenizer.json.
        """
        fresh = self._compiled(grammar).deep_copy()
        return Matcher(fresh, self._tokenizer.vocab_size, self._vocab_size, self._eos_ids)

    def _compile(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            log.error("a grammar can't be followed: %s", _reason(matcher))
        return matcher

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        if not self._file.is_file():
            raise ConfigError(f"MODEL: {self._file} is missing; grammars need it")
        return LLTokenizer(self._file.read_text(), eos_token=self._eos_ids or None)


class Matcher:
    """One sequence's place in a grammar."""

    def __init__(
        self, matcher: LLMatcher, tokenizer_size: int, vocab_size: int, eos_ids: list[int]
    ) -> None:
        self._matcher = matcher
        self._words = np.zeros((tokenizer_size + 31) // 32, dtype=np.uint32)
        self._size = min(tokenizer_size, vocab_size)
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids

    @property
    def ended(self) -> bool:
        """Nothing but an end-of-sequence id may follow."""
        return self._matcher.is_stopped()

    def advance(self, ids: list[int]) -> None:
        """Take output ids in. An id that the grammar doesn't admit ends it, for good."""
        # llguidance refuses every id after the end, and what follows it (output of a request
        # that ignores end-of-sequence ids) is none of the grammar's business.
        for token in ids:
            if self.ended:
                return
            if not self._matcher.consume_token(token):
                log.warning("the grammar ends early: %s", _reason(self._matcher))

    def mask(self) -> NDArray[np.bool_]:
        """Which ids may come next, [vocab_size]; ids that the tokenizer lacks may not."""
        allowed = np.zeros(self._vocab_size, dtype=np.bool_)
        if self.ended:
            allowed[self._eos_ids] = True
            return allowed
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        bits = np.unpackbits(self._words.view(np.uint8), bitorder="little")
        allowed[: self._size] = bits[: self._size]
        return allowed


def _reason(matcher: LLMatcher) -> str:
    """llguidance's error without the state that it prints below."""
    return matcher.get_error().partition("\n")[0]
