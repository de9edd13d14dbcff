"""Ids to text, one by one: whatever ends inside a character waits for the rest of it."""

from __future__ import annotations

import codecs

from staffel.api.tokens import Tokenizer


class Detokenizer:
    """The text of one growing sequence of ids; special tokens stand for no text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, id: int) -> str:
        """The whole characters that are complete with this token."""
        if id in self._tokenizer.special_ids:
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(id))

    def flush(self) -> str:
        """The end: what never became a whole character, as replacement characters."""
        return self._utf8.decode(b"", final=True)
