"""What is asked: lengths and prompts, apart from when."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, Protocol

from msgspec import Struct

Style = Literal["prose", "code"]
"""What text is made of where the workload has lengths only."""


class Lengths(Struct, frozen=True, array_like=True):
    """One request's sizes, and what its prompt has in common with others'.

    A prompt is, in order: `shared` tokens, the blocks of `prefix`, and text of its own.
    """

    prompt_tokens: int
    """All of the prompt, shared parts included."""
    output_tokens: int
    prefix: tuple[int, ...] = ()
    """Ids of the prompt's leading blocks; equal ids mean equal text (prefix caches may help)."""
    block: int = 512
    """Tokens of one block of `prefix`; the last block ends where the prompt ends."""
    shared: int = 0
    """Leading tokens that all requests have in common, before the blocks."""
    shortened: bool = False
    """It was made shorter to fit the model."""
    text: str | None = None
    """The prompt itself where the workload has it; `prompt_tokens` may ask for less of it."""


class Ask(Struct, frozen=True):
    """One request to send."""

    prompt: str | list[int]
    """Text, or token ids where the workload has them."""
    output_tokens: int
    """max_tokens, with ignore_eos where the server takes it."""
    prompt_tokens: int
    """Meant length; the server says what it counted."""


class Workload(Protocol):
    """A source of requests. The same seed gives the same ones."""

    @property
    def name(self) -> str:
        """As the user named it, with all that changes it: what `compare` compares."""

    @property
    def style(self) -> Style:
        """What its prompts are made of where it has no text of its own."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the result should know, such as rows of a file that were left out."""

    def lengths(self, seed: int) -> Iterator[Lengths]:
        """Endless, or as long as the file is; in the trace's order if it is one."""

    def arrivals(self) -> list[float] | None:
        """A trace's own arrival times in seconds from 0, one for each request; None: none."""


def shortened_note(asked: Iterable[Lengths]) -> str | None:
    """How many of a run's requests were made shorter to fit the model; None: not one."""
    flags = [lengths.shortened for lengths in asked]
    if not any(flags):
        return None
    return f"{sum(flags)} of {len(flags)} requests were shortened to fit the model's context"
