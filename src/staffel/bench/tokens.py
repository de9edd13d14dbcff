"""How many tokens each chunk brought: as the server says, or else as can be found out."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import Protocol

import tokenizers
from msgspec import Struct

from staffel.bench.records import TokensFrom
from staffel.config import ConfigError


class Piece(Struct, gc=False):
    """What one read from the socket brought, as the stream told it."""

    at: float
    events: int
    """Events with content or a token."""
    ids: int
    """Token ids."""
    scores: int
    """Log probabilities."""
    running: int
    """Output tokens so far, from usage in the chunk itself; 0: it had none."""
    text: str
    """Kept only where a tokenizer needs it."""


class Tokenizer(Protocol):
    def ends(self, text: str) -> list[int]:
        """For each token of `text`, the index of the character after its last."""


class TextTokenizer:
    """Tokens of finished text. Needs a folder's tokenizer.json alone."""

    def __init__(self, folder: str) -> None:
        """Raises ConfigError where there is no tokenizer to be read."""
        file = Path(folder) / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(
                f"--tokenizer: {folder} has no tokenizer.json; give the model's folder"
            )
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(f"--tokenizer: {file}: {error}") from None

    def ends(self, text: str) -> list[int]:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return [end for _, end in encoding.offsets]


def count_tokens(
    pieces: Sequence[Piece], total: int | None, tokenizer: Tokenizer | None
) -> tuple[list[int], TokensFrom]:
    """Tokens of each piece, and how they are known. The first of these that there is:

    * "ids": the token ids in the piece; "logprobs": its log probabilities;
    * "usage": the rise of the usage that comes with each chunk;
    * "text": the whole text tokenised once; a token belongs to the piece with its last character.
      Its sum may differ from the server's count (a text has more than one tokenisation), so that
      `Record.tokens` still prefers the server's;
    * "spread": the usage's `total`, over the events as evenly as whole numbers allow;
    * "none": no way to know; all 0.
    """
    if not pieces:
        return [], "none"
    if any(piece.ids for piece in pieces):
        return [piece.ids for piece in pieces], "ids"
    if any(piece.scores for piece in pieces):
        return [piece.scores for piece in pieces], "logprobs"
    if pieces[0].running:
        return _rises([piece.running for piece in pieces]), "usage"
    if tokenizer is not None:
        return _by_text([piece.text for piece in pieces], tokenizer), "text"
    if total:
        return _spread(total, [piece.events for piece in pieces]), "spread"
    return [0] * len(pieces), "none"


def _rises(running: list[int]) -> list[int]:
    return [max(after - before, 0) for before, after in pairwise([0, *running])]


def _by_text(texts: list[str], tokenizer: Tokenizer) -> list[int]:
    counts = [0] * len(texts)
    borders = list(accumulate(len(text) for text in texts))
    for end in tokenizer.ends("".join(texts)):
        counts[bisect_left(borders, end)] += 1
    return counts


def _spread(total: int, events: list[int]) -> list[int]:
    each = iter(_even(total, sum(events)))
    return [sum(islice(each, count)) for count in events]


def _even(total: int, parts: int) -> list[int]:
    """The first part gets no more than its share, since TPOT divides by the tokens after it."""
    if parts == 1:
        return [total]
    first = max(1, total // parts)
    rest, later = total - first, parts - 1
    return [first, *(rest * (n + 1) // later - rest * n // later for n in range(later))]
