"""What is asked: lengths and prompts, apart from when."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from msgspec import Struct


class Lengths(Struct, frozen=True, array_like=True):
    """One request's sizes."""

    prompt_tokens: int
    output_tokens: int
    prefix: tuple[int, ...] = ()
    """Ids of the prompt's leading blocks; equal ids mean equal text (prefix caches may help)."""


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

    name: str
    """As the user named it, with all that changes it: what `compare` compares."""

    def lengths(self, seed: int) -> Iterator[Lengths]:
        """Endless, or as long as the file is; in the trace's order if it is one."""

    def arrivals(self) -> list[float] | None:
        """A trace's own arrival times in seconds from 0; None: it has none."""
