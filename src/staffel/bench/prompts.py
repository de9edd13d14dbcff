"""Prompts of wanted lengths: different where caches must not help, equal where they should.

A prompt is put together from pieces whose tokens were counted beforehand, each in its place after
a letter, where every usual tokenizer starts anew. So making one costs no tokenising, and its
length is known to the token; a trial at the start says (in `notes`) where it isn't.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import repeat, takewhile
from random import Random
from typing import NamedTuple

from staffel.bench import corpus
from staffel.bench.encoders import Encode, approximate_tokens
from staffel.bench.workload import Ask, Lengths, Style
from staffel.config import ConfigError

_HEADS = 128
"""Words that a number is written in, at the head of a part: 4 of them are 28 bits."""
_DIGITS = 4
_BEFORE = "start"
_BLOCKS_KEPT = 4096


class Piece(NamedTuple):
    text: str
    tokens: int
    ids: tuple[int, ...]
    """Empty where no tokenizer is known."""


class PromptMaker:
    """Makes prompts; the same seed makes the same ones.

    Do it ahead of a run: 1,000 prompts of 1,000 tokens take about a tenth of a second, files'
    own texts more.
    """

    def __init__(
        self,
        encode: Encode | None,
        *,
        seed: int = 0,
        style: Style = "prose",
        as_ids: bool = False,
        extra_tokens: int | None = None,
    ) -> None:
        """
        Args:
            encode: None: lengths are approximations (see `approximate_tokens`).
            as_ids: Prompts are lists of token ids: exact with any tokenizer. The completions API
                takes them, chat doesn't.
            extra_tokens: What the server adds to a prompt and counts, such as its chat template;
                None: the special tokens that `encode` adds.

        Raises:
            ConfigError: `as_ids` without `encode`.
        """
        if as_ids and encode is None:
            raise ConfigError("--tokenizer: prompts of token ids need one; give the model's folder")
        self._seed, self._style, self._as_ids = seed, style, as_ids
        self._encode = encode
        self._special = _special_ids(encode)
        self._extra = len(self._special) if extra_tokens is None else extra_tokens
        heads = corpus.WORDS[:_HEADS]
        self._words = self._pieces(f" {word}" for word in heads)
        self._starts = self._first_pieces(corpus.opening(style, first=True) + w for w in heads)
        self._openers = self._pieces(corpus.opening(style, first=False) + w for w in heads)
        self._body = self._pieces(corpus.pieces(style))
        self._fillers = [word for word in self._words if word.tokens == 1]
        self._longest = max(self._body, key=lambda piece: piece.tokens)
        self._block = lru_cache(_BLOCKS_KEPT)(self._part)
        self.notes = self._trial()

    def asks(self, wanted: Iterable[Lengths]) -> list[Ask]:
        """One for each, numbered from 0."""
        return [self.ask(index, lengths) for index, lengths in enumerate(wanted)]

    def ask(self, index: int, lengths: Lengths) -> Ask:
        """Request number `index` of a run: another index is another text."""
        if lengths.text is not None:
            return self._ask_of_text(lengths, lengths.text)
        pieces = list(self._made(index, lengths))
        if self._as_ids:
            ids = [*self._special, *(token for piece in pieces for token in piece.ids)]
            return Ask(ids, lengths.output_tokens, len(ids))
        tokens = self._extra + sum(piece.tokens for piece in pieces)
        return Ask("".join(piece.text for piece in pieces), lengths.output_tokens, tokens)

    def _made(self, index: int, lengths: Lengths) -> Iterator[Piece]:
        """The shared tokens, the blocks, and the rest, until the prompt is long enough."""
        left = max(1, lengths.prompt_tokens - self._extra)
        parts = [("shared", 0, lengths.shared)] if lengths.shared else []
        parts += [("block", number, lengths.block) for number in lengths.prefix]
        first = True
        for kind, number, size in [*parts, ("own", index, left)]:
            size = min(size, left)
            if size:
                make = self._part if kind == "own" else self._block
                yield from make(kind, number, size, first)
            left, first = left - size, False

    def _part(self, kind: str, number: int, tokens: int, first: bool) -> list[Piece]:
        """So many tokens of text that begins with its number in words, and is nowhere else."""
        rng = Random(f"{self._seed}/{kind}/{number}")
        head = self._head(f"{self._seed}/{kind}", number, first)
        pieces, left = _fill(head, tokens)
        if left:
            pool, size = self._body, len(self._body)
            more, left = _fill((pool[int(rng.random() * size)] for _ in repeat(None)), left)
            pieces += more
        return [*pieces, *self._rest(left, rng)]

    def _head(self, kind: str, number: int, first: bool) -> list[Piece]:
        """Its fastest digit comes first: neighbours differ in their first token.

        The digits are shifted by the seed, so that runs differ in theirs.
        """
        salt = Random(kind)
        digits = [number // _HEADS**place for place in range(_DIGITS)]
        places = [(digit + int(salt.random() * _HEADS)) % _HEADS for digit in digits]
        start = self._starts if first else self._openers
        return [start[places[0]], *(self._words[place] for place in places[1:])]

    def _rest(self, tokens: int, rng: Random) -> list[Piece]:
        """Single words up to the wanted length; with ids, what is short of it cut from a piece."""
        words = self._fillers or self._words
        pieces, left = _fill((words[int(rng.random() * len(words))] for _ in repeat(None)), tokens)
        if left and self._as_ids:
            pieces.append(Piece("", left, self._longest.ids[:left]))
        return pieces

    # --- counting ---

    def _pieces(self, texts: Iterable[str]) -> list[Piece]:
        """Counted as they are after a letter."""
        if self._encode is None:
            return [Piece(text, approximate_tokens(text), ()) for text in texts]
        before = len(self._encode(_BEFORE))
        return [_piece(text, self._encode(_BEFORE + text)[before:]) for text in texts]

    def _first_pieces(self, texts: Iterable[str]) -> list[Piece]:
        """Counted as they are at the beginning."""
        if self._encode is None:
            return self._pieces(texts)
        special = len(self._special)
        return [_piece(text, self._encode(text)[special:]) for text in texts]

    def _trial(self) -> tuple[str, ...]:
        if self._encode is None:
            return ("prompt lengths are approximations: no tokenizer is known",)
        if not self._fillers and not self._as_ids:
            return ("prompt lengths are up to a word too short: no word is one token",)
        pieces = list(self._made(0, Lengths(400 + self._extra, 1, prefix=(0,), block=100)))
        counted = len(self._encode("".join(piece.text for piece in pieces))) - len(self._special)
        meant = sum(piece.tokens for piece in pieces)
        if counted == meant or self._as_ids:
            return ()
        return (f"prompt lengths differ from the meant ones by about {counted / meant - 1:+.1%}",)

    # --- texts that the workload brings ---

    def _ask_of_text(self, lengths: Lengths, text: str) -> Ask:
        """The text behind the shared tokens, cut where less of it is wanted."""
        shared = self._block("shared", 0, lengths.shared, True) if lengths.shared else []
        head = "".join(piece.text for piece in shared) + ("\n" if shared else "")
        if self._as_ids:
            assert self._encode is not None
            ids = self._encode(head + text)[: lengths.prompt_tokens]
            return Ask(ids, lengths.output_tokens, len(ids))
        text = head + _cut(text, lengths.prompt_tokens, lambda part: self._count(head + part))
        extra = self._extra - len(self._special)
        return Ask(text, lengths.output_tokens, self._count(text) + extra)

    def _count(self, text: str) -> int:
        return approximate_tokens(text) if self._encode is None else len(self._encode(text))


def _special_ids(encode: Encode | None) -> list[int]:
    """What the tokenizer puts before any text: what two unlike ones have in common."""
    if encode is None:
        return []
    pairs = zip(encode("start"), encode("Over"), strict=False)
    return [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]


def _piece(text: str, ids: list[int]) -> Piece:
    # None at all: it became one with what was before it. The trial shows what that does.
    return Piece(text, max(1, len(ids)), tuple(ids))


def _fill(pieces: Iterable[Piece], tokens: int) -> tuple[list[Piece], int]:
    """The leading pieces that fit into so many tokens, and the tokens that are left."""
    taken: list[Piece] = []
    for piece in pieces:
        if piece.tokens > tokens:
            break
        taken.append(piece)
        tokens -= piece.tokens
    return taken, tokens


def _cut(text: str, tokens: int, count: Callable[[str], int]) -> str:
    """The longest beginning of `text` with at most so many tokens, found by halving."""
    if count(text) <= tokens:
        return text
    fits, beyond = 1, len(text)
    while beyond - fits > 1:
        middle = (fits + beyond) // 2
        if count(text[:middle]) <= tokens:
            fits = middle
        else:
            beyond = middle
    return text[:fits]
