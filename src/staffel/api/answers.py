"""A generation as one JSON answer or as a stream of chunks, the same for both endpoints."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol

from staffel.api.generation import Generation
from staffel.api.output import Piece
from staffel.api.protocol import ChatBody, CompletionBody, StreamOptions


class View(Protocol):
    """How an endpoint shows choices."""

    object: str
    chunk_object: str

    def choice(self, index: int, piece: Piece) -> dict[str, Any]:
        """A whole choice."""

    def parts(self, index: int, piece: Piece, *, first: bool) -> list[dict[str, Any]]:
        """What a piece adds to a streamed choice; `first` is the first of this choice."""

    def extras(self) -> dict[str, Any]:
        """Fields beside the choices, in the answer or in the first chunk."""


async def whole(generation: Generation, view: View, head: dict[str, Any]) -> dict[str, Any]:
    """The answer of a request that isn't streamed."""
    choices = [Piece() for _ in generation.job.requests]
    async with aclosing(generation.pieces()) as pieces:
        async for index, piece in pieces:
            choices[index].extend(piece)
    return {
        **head,
        "object": view.object,
        "choices": [view.choice(index, choice) for index, choice in enumerate(choices)],
        "usage": generation.usage(),
        **view.extras(),
    }


async def chunks(
    generation: Generation, view: View, head: dict[str, Any], body: CompletionBody | ChatBody
) -> AsyncGenerator[dict[str, Any]]:
    """The chunks of a streamed request, the usage chunk included if it was asked for."""
    options = body.stream_options or StreamOptions()
    head = {**head, "object": view.chunk_object}
    extras = view.extras()
    begun: set[int] = set()
    async with aclosing(generation.pieces()) as pieces:
        async for index, piece in pieces:
            if index in begun and not _worth_a_chunk(piece, body, options):
                continue
            for part in view.parts(index, piece, first=index not in begun):
                yield {**head, "choices": [part], **_running_usage(generation, options), **extras}
                extras = {}
            begun.add(index)
    if options.include_usage:
        yield {**head, "choices": [], "usage": generation.usage()}


def _worth_a_chunk(piece: Piece, body: CompletionBody | ChatBody, options: StreamOptions) -> bool:
    """Whether a client can see anything of it: text may be held back for now."""
    counted = body.return_token_ids or options.continuous_usage_stats
    return bool(piece.text or piece.finish or piece.scores or (counted and piece.ids))


def _running_usage(generation: Generation, options: StreamOptions) -> dict[str, Any]:
    if options.continuous_usage_stats:
        return {"usage": generation.usage()}
    return {"usage": None} if options.include_usage else {}
