"""One choice's deltas turned into pieces of text, up to its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from staffel.api.detokenize import Detokenizer
from staffel.api.stops import StopScanner
from staffel.api.tokens import Tokenizer
from staffel.control.messages import Delta
from staffel.control.request import FinishReason, SamplingParams, TokenLogprobs


class Scored(NamedTuple):
    """A token with its log probabilities and its place in the text."""

    token: int
    logprob: float | None
    """None for a prompt's first token: nothing comes before it."""
    top: list[tuple[int, float]]
    offset: int
    """Characters of the choice's text before the token."""


@dataclass(slots=True)
class Piece:
    """What one delta adds to a choice; pieces add up to the whole choice."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    scores: list[Scored] = field(default_factory=list)
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or the client's stop id that ended the text."""

    def extend(self, other: Piece) -> None:
        self.text += other.text
        self.ids += other.ids
        self.scores += other.scores
        self.finish = other.finish
        self.stop_reason = other.stop_reason


@dataclass(frozen=True, slots=True)
class Ending:
    """What ends a choice besides its number of tokens."""

    stops: list[str]
    stop_token_ids: frozenset[int]
    """Those that the client named; they are told as the stop reason."""


class Output:
    """The text of one choice. A stop string ends it wherever the engine is by then."""

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, ending: Ending, echo: Echo | None
    ) -> None:
        self._params = params
        self._ending = ending
        self._echo = echo
        self._detokenizer = Detokenizer(tokenizer)
        self._scanner = StopScanner(ending.stops)
        self._chars = len(echo.text) if echo else 0
        """Characters decoded so far, those held back included."""
        self.count = 0
        """Output tokens up to the end."""
        self.finish: FinishReason | None = None

    def add(self, delta: Delta) -> Piece:
        """The delta's share of the choice. After a finish: none."""
        piece = self._begin(delta)
        for place, id in enumerate(delta.ids):
            last = place == len(delta.ids) - 1
            self._take(piece, delta, place, silent=last and self._is_stop(delta, id))
            if piece.finish:
                break
        else:
            self._end(piece, delta)
        self.finish = piece.finish
        return piece

    def _begin(self, delta: Delta) -> Piece:
        if self._echo is None:
            return Piece()
        echo, self._echo = self._echo, None
        wanted = self._params.prompt_logprobs is not None
        # Of a prompt of one token there is none: nothing comes before it.
        return echo.piece((delta.prompt_logprobs or []) if wanted else None)

    def _is_stop(self, delta: Delta, id: int) -> bool:
        return delta.finish == "stop" and id in self._params.stop_ids

    def _take(self, piece: Piece, delta: Delta, place: int, *, silent: bool) -> None:
        """Add one token; `silent` for one that ends the text and is no part of it."""
        id = delta.ids[place]
        self.count += 1
        piece.ids.append(id)
        if delta.logprobs is not None:
            piece.scores.append(_scored(delta.logprobs[place], self._chars))
        text = "" if silent else self._detokenizer.add(id)
        self._chars += len(text)
        # Like the stop ids, stop strings count from the token after the first min_tokens on.
        released, stop = self._scanner.feed(text, armed=self.count > self._params.min_tokens)
        piece.text += released
        if stop is not None:
            piece.finish, piece.stop_reason = "stop", stop

    def _end(self, piece: Piece, delta: Delta) -> None:
        """The engine's own end, if it is one."""
        if delta.finish is None:
            return
        released, stop = self._scanner.feed(self._detokenizer.flush())
        piece.text += released
        piece.text += self._scanner.flush()
        piece.finish = "stop" if stop is not None else delta.finish
        piece.stop_reason = stop
        if delta.ids and self._is_stop(delta, delta.ids[-1]):
            named = delta.ids[-1] in self._ending.stop_token_ids
            piece.stop_reason = delta.ids[-1] if named else None


def _scored(entry: TokenLogprobs, offset: int) -> Scored:
    return Scored(entry.token, entry.logprob, entry.top, offset)


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that is given back in front of the output."""

    text: str
    ids: list[int]
    offsets: list[int]

    def piece(self, logprobs: list[TokenLogprobs] | None) -> Piece:
        """The prompt's text, with the log probabilities of all tokens but the first; None: not
        asked for."""
        if logprobs is None:
            return Piece(text=self.text)
        first = Scored(self.ids[0], None, [], self.offsets[0])
        rest = [_scored(entry, at) for entry, at in zip(logprobs, self.offsets[1:], strict=True)]
        return Piece(text=self.text, scores=[first, *rest])

    @classmethod
    def of(cls, tokenizer: Tokenizer, ids: list[int], text: str | None) -> Echo:
        """`text` is what the client wrote, None if it gave the ids."""
        text = tokenizer.decode(ids) if text is None else text
        return cls(text, ids, prompt_offsets(tokenizer, ids, text))


def prompt_offsets(tokenizer: Tokenizer, ids: list[int], text: str) -> list[int]:
    """Where each prompt token begins in `text`, in characters.

    A special token takes room only where the text has it written out; one that the tokeniser
    added by itself has none.
    """
    detokenizer, offsets, chars = Detokenizer(tokenizer), [], 0
    for id in ids:
        offsets.append(min(chars, len(text)))
        written = tokenizer.token_bytes(id).decode(errors="replace")
        if id not in tokenizer.special_ids:
            chars += len(detokenizer.add(id))
        elif text.startswith(written, chars):
            chars += len(written)
    return offsets
