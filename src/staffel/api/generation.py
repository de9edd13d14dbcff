"""The choices of one client request, from submission to the last token.

Both endpoints run through here; they differ in how they render the pieces.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from staffel.api import errors
from staffel.api.engine import Engine, Stream
from staffel.api.output import Echo, Ending, Output, Piece
from staffel.api.record import Record
from staffel.api.tokens import Tokenizer
from staffel.control.messages import Delta, Failure
from staffel.control.request import Request


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: list[int]
    echo: Echo | None = None
    """Set where the prompt is to be given back."""


@dataclass(frozen=True, slots=True)
class Job:
    """A client request, validated and tokenised: choice i belongs to prompt i // n."""

    prompts: list[Prompt]
    requests: list[Request]
    n: int
    ending: Ending


class Generation:
    """Runs a Job on the engine. Whatever way it ends, nothing of it keeps running."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, job: Job, record: Record) -> None:
        self.job = job
        self._engine = engine
        self._record = record
        self._outputs = [
            Output(tokenizer, request.params, job.ending, job.prompts[index // job.n].echo)
            for index, request in enumerate(job.requests)
        ]
        self._running: set[int] = set()
        """Choices that the engine may still be at work on."""
        record.prompt_tokens = sum(len(prompt.ids) for prompt in job.prompts)

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece]]:
        """(choice, piece) as they come; the last of each choice has `finish`.

        Raises:
            ApiError: the server isn't ready, or the engine gave a choice up.
        """
        try:
            async with aclosing(_merged(self._submit())) as items:
                async for index, item in items:
                    if isinstance(item, Failure):
                        raise errors.from_failure(item)
                    if self._outputs[index].finish is None:
                        yield index, self._take(index, item)
                    if all(output.finish for output in self._outputs):
                        return
            raise RuntimeError("a stream of the engine ended without a finish")
        finally:
            for index in sorted(self._running):
                self._engine.cancel(self.job.requests[index].id)

    def _submit(self) -> list[Stream]:
        if (state := self._engine.state()) != "ready":
            raise errors.not_ready(state)
        self._running.update(range(len(self.job.requests)))
        return [self._engine.submit(request) for request in self.job.requests]

    def _take(self, index: int, delta: Delta) -> Piece:
        piece = self._outputs[index].add(delta)
        self._record.tokens(index, len(piece.ids))
        if delta.cached_tokens is not None and index % self.job.n == 0:
            self._record.cached_tokens += delta.cached_tokens
        if piece.finish:
            self._finish(index, piece, at_work=delta.finish is None)
        return piece

    def _finish(self, index: int, piece: Piece, *, at_work: bool) -> None:
        assert piece.finish
        self._record.finishes.append(piece.finish)
        self._running.discard(index)
        if at_work:
            self._engine.cancel(self.job.requests[index].id)

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage, up to now. A prompt counts once for all of its choices."""
        prompt = self._record.prompt_tokens
        output = sum(output.count for output in self._outputs)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": self._record.cached_tokens},
        }


async def _merged(streams: list[Stream]) -> AsyncGenerator[tuple[int, Delta | Failure]]:
    """The items of all streams as they come, each with its stream's place."""
    arrived: asyncio.Queue[tuple[int, Delta | Failure | BaseException | None]] = asyncio.Queue()

    async def pump(index: int, stream: Stream) -> None:
        try:
            async for item in stream:
                arrived.put_nowait((index, item))
        except Exception as error:
            arrived.put_nowait((index, error))
        arrived.put_nowait((index, None))

    pumps = [asyncio.create_task(pump(*numbered)) for numbered in enumerate(streams)]
    open_streams = len(streams)
    try:
        while open_streams:
            index, item = await arrived.get()
            if item is None:
                open_streams -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield index, item
    finally:
        for task in pumps:
            task.cancel()
