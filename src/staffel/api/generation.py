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

_AT_ONCE = 8
"""Choices that are submitted in one turn of the event loop."""

_UNDER_WAY = 256
"""Choices of a request that are with the engine at a time: more would fill its queue for others."""


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
        self._unfinished = len(job.requests)
        self._places = asyncio.Semaphore(_UNDER_WAY)
        self._running: set[int] = set()
        """Choices that the engine may still be at work on."""
        record.prompt_tokens = sum(len(prompt.ids) for prompt in job.prompts)

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece]]:
        """(choice, piece) as they come; the last of each choice has `finish`.

        Raises:
            ApiError: the server isn't ready, or the engine gave a choice up.
        """
        try:
            if (state := self._engine.state()) != "ready":
                raise errors.not_ready(state)
            async with aclosing(self._news()) as items:
                async for index, item in items:
                    if isinstance(item, Failure):
                        raise errors.from_failure(item)
                    if self._outputs[index].finish is None:
                        yield index, self._take(index, item)
                    if not self._unfinished:
                        return
            raise RuntimeError("a stream of the engine ended without a finish")
        finally:
            for index in sorted(self._running):
                self._engine.cancel(self.job.requests[index].id)

    async def _news(self) -> AsyncGenerator[tuple[int, Delta | Failure]]:
        """What the engine says of all choices as it comes, each with its choice.

        They are submitted some at a time, and the next as others end: other requests have their
        turn in between, and when the engine refuses one the rest is never sent.
        """
        arrived: asyncio.Queue[tuple[int, Delta | Failure | BaseException | None]] = asyncio.Queue()
        tasks: list[asyncio.Task[None]] = []

        async def pump(index: int, stream: Stream) -> None:
            try:
                async for item in stream:
                    arrived.put_nowait((index, item))
            except Exception as error:
                arrived.put_nowait((index, error))
            arrived.put_nowait((index, None))

        async def submit() -> None:
            for index, request in enumerate(self.job.requests):
                await self._places.acquire()
                self._running.add(index)
                tasks.append(asyncio.create_task(pump(index, self._engine.submit(request))))
                if index % _AT_ONCE == _AT_ONCE - 1:
                    await asyncio.sleep(0)

        tasks.append(asyncio.create_task(submit()))
        tasks[0].add_done_callback(lambda task: _report_failure(task, arrived))
        open_streams = len(self.job.requests)
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
            for task in tasks:
                task.cancel()

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
        self._unfinished -= 1
        self._places.release()
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


def _report_failure(task: asyncio.Task[None], arrived: asyncio.Queue[Any]) -> None:
    """A submission that went wrong ends the whole request."""
    error = None if task.cancelled() else task.exception()
    if error is not None:
        arrived.put_nowait((0, error))
