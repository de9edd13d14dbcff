"""Grammars that constrain the output, through llguidance.

A grammar travels as text. What may come next is a pure function of that text and of the output
ids, so a matcher is rebuilt from ids wherever a sequence goes on.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from staffel import grammar as grammars

log = logging.getLogger(__name__)

_KEPT_GRAMMARS = 64
"""Those used last stay compiled; the choices of a request share theirs."""

_NICENESS = 15
"""Of the thread that compiles: a step that runs on the same core takes precedence."""


class Grammars:
    """Makes matchers for one model. The tokenizer is read when the first is asked for.

    Compiling can take longer than many steps, so a thread does it: `want` says what is needed,
    `arrived` what can be used from now on, and `matcher` never waits for any of these.
    """

    def __init__(
        self,
        model_path: Path,
        vocab_size: int,
        eos_ids: tuple[int, ...],
        kept: int = _KEPT_GRAMMARS,
    ) -> None:
        """`vocab_size` is the logits' width, which may differ from the tokenizer's; `kept` is how
        many grammars stay compiled."""
        self._model_path = model_path
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._kept = kept
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Condition()
        """Of all below, and of `_compiled`."""
        self._wanted: list[str] = []
        self._at_work: str | None = None
        self._arrived: list[tuple[str, str | None]] = []
        self._thread: threading.Thread | None = None

    # ---- compiling beside the steps

    def want(self, texts: Sequence[str]) -> None:
        """Grammars that somebody waits for now; what isn't among them any more is forgotten."""
        with self._lock:
            seen_to = {self._at_work, *(text for text, _ in self._arrived)}
            self._wanted = [text for text in texts if text not in seen_to]
            if self._wanted and self._thread is None:
                self._thread = threading.Thread(target=self._work, name="grammars", daemon=True)
                self._thread.start()
            self._lock.notify()

    def arrived(self) -> list[tuple[str, str | None]]:
        """Grammars that were wanted, and what is wrong with each, since the last call."""
        with self._lock:
            news, self._arrived = self._arrived, []
            return news

    def _work(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._wanted)
                text = self._at_work = self._wanted.pop(0)
            trouble = self._prepare(text)
            with self._lock:
                self._at_work = None
                self._arrived.append((text, trouble))

    def _prepare(self, text: str) -> str | None:
        try:
            return grammars.problem(self._get(text))
        except Exception as error:  # it would be the end of the thread, and of all that wait
            log.exception("a grammar can't be compiled")
            return str(error)

    # ---- using them

    def matcher(self, grammar: str) -> Matcher:
        """A matcher at the start of `grammar`, llguidance's grammar text.

        Raises:
            ConfigError: the model has no tokenizer that llguidance can use.
        """
        fresh = self._get(grammar).deep_copy()
        return Matcher(fresh, self._tokenizer.vocab_size, self._vocab_size, self._eos_ids)

    def _get(self, text: str) -> LLMatcher:
        with self._lock:
            found = self._compiled.get(text)
            if found is not None:
                self._compiled.move_to_end(text)
                return found
        made = grammars.compiled(self._tokenizer, text)
        with self._lock:
            self._compiled[text] = made
            if len(self._compiled) > self._kept:
                self._compiled.popitem(last=False)
        return made

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        return grammars.load_tokenizer(self._model_path, self._eos_ids)


class Matcher:
    """One sequence's place in a grammar."""

    def __init__(
        self,
        matcher: LLMatcher,
        tokenizer_size: int,
        vocab_size: int,
        eos_ids: tuple[int, ...],
    ) -> None:
        self._matcher = matcher
        self._words = np.zeros((tokenizer_size + 31) // 32, dtype=np.uint32)
        self._size = min(tokenizer_size, vocab_size)
        self._vocab_size = vocab_size
        self._eos_ids = list(eos_ids)

    @property
    def ended(self) -> bool:
        """Nothing but an end-of-sequence id may follow."""
        return self._matcher.is_stopped()

    @property
    def problem(self) -> str | None:
        """Why the grammar couldn't be followed to its end: beyond its limits, or left by an id
        that it doesn't admit. It has ended then."""
        return grammars.problem(self._matcher)

    def advance(self, ids: list[int]) -> None:
        """Take output ids in. An id that the grammar doesn't admit ends it, for good."""
        # llguidance refuses every id after the end, and what follows it (output of a request
        # that ignores end-of-sequence ids) is none of the grammar's business.
        for token in ids:
            if self.ended:
                return
            self._matcher.consume_token(token)

    def mask(self) -> NDArray[np.bool_]:
        """Which ids may come next, [vocab_size]; ids that the tokenizer lacks may not."""
        allowed = np.zeros(self._vocab_size, dtype=np.bool_)
        if not self.ended:
            self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        if self.ended:  # before, or as it took too much to find out what may follow
            allowed[self._eos_ids] = True
            return allowed
        bits = np.unpackbits(self._words.view(np.uint8), bitorder="little")
        allowed[: self._size] = bits[: self._size]
        return allowed
