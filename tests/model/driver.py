"""Drives an Executor by hand-made batches: chunked prefill mixed with decode, no scheduler."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from staffel.control.messages import Batch, BatchResult, Enter, ReadChunk, Row, RowResult
from staffel.control.request import SamplingParams
from staffel.model.executor import Executor


@dataclass
class Seat:
    """A sequence in a slot."""

    slot: int
    prompt: list[int]
    params: SamplingParams
    outputs: list[int] = field(default_factory=list)
    """Those it entered with."""
    blocks: list[int] = field(default_factory=list)
    done: int = 0
    """Positions computed."""
    results: list[RowResult] = field(default_factory=list)
    """Of the rows that drew."""
    scores: list[object] = field(default_factory=list)

    @property
    def known(self) -> int:
        return len(self.prompt) + len(self.outputs) + len(self.results)

    @property
    def tokens(self) -> list[int]:
        return [result.token for result in self.results]


class Driver:
    """Allocates blocks in random order, so that no table is in sequence by luck."""

    def __init__(self, executor: Executor, seed: int = 0) -> None:
        self.executor = executor
        self.block_size = executor.region.block_size
        self.free = list(range(executor.region.num_blocks))
        random.Random(seed).shuffle(self.free)
        self.slots = list(range(executor.region.slots))
        self.dispatch = 0
        self.grown: list[tuple[int, list[int]]] = []
        """Blocks that the executor hasn't been told of."""

    def run(
        self,
        *,
        leaves: tuple[int, ...] = (),
        enters: tuple[Enter, ...] = (),
        reads: tuple[ReadChunk, ...] = (),
        decodes: tuple[int, ...] = (),
        rows: tuple[Row, ...] = (),
        grown: tuple[tuple[int, list[int]], ...] = (),
    ) -> BatchResult:
        tables, self.grown = [*self.grown, *grown], []
        return self.executor.execute(
            Batch(0, list(leaves), list(enters), tables, list(reads), list(decodes), list(rows))
        )

    def enter(
        self, prompt: list[int], params: SamplingParams, outputs: list[int] | None = None
    ) -> Seat:
        self.dispatch += 1
        seat = Seat(self.slots.pop(), prompt, params, list(outputs or []))
        ids = prompt + seat.outputs
        self.run(enters=(Enter(seat.slot, self.dispatch, ids, len(prompt), params),))
        return seat

    def leave(self, seat: Seat) -> None:
        self.run(leaves=(seat.slot,))
        self.free = seat.blocks + self.free
        self.slots.append(seat.slot)

    def row(self, seat: Seat, chunk: int) -> Row:
        """The seat's next chunk."""
        start, count = seat.done, min(chunk, seat.known - seat.done)
        self.advance(seat, count)
        sample = seat.done == seat.known and seat.params.max_tokens > 0
        return Row(seat.slot, start, count, sample)

    def advance(self, seat: Seat, count: int) -> None:
        """So many more positions are computed; there are blocks for them."""
        seat.done += count
        while len(seat.blocks) * self.block_size < seat.done:
            seat.blocks.append(self.free.pop())
            self.grown.append((seat.slot, seat.blocks[-1:]))

    def step(self, seats: list[Seat], chunk: int) -> None:
        """Each seat's next token, or the next chunk of its prompt."""
        running = [seat for seat in seats if seat.results]
        prompts = [seat for seat in seats if not seat.results]
        for seat in running:
            self.advance(seat, 1)
        rows = tuple(self.row(seat, chunk) for seat in prompts)
        result = self.run(decodes=tuple(seat.slot for seat in running), rows=rows)
        for place, (seat, token) in enumerate(zip(running, result.tokens, strict=True)):
            seat.results.append(result.details.get(place) or RowResult(token))
        for seat, row, found in zip(prompts, rows, result.rows, strict=True):
            seat.scores += found.prompt_logprobs or []
            if row.sample:
                seat.results.append(found)

    def take_over(self, seat: Seat) -> Seat:
        """A seat with blocks for what another driver's `seat` has computed; nothing is read yet."""
        taken = self.enter(seat.prompt, seat.params, seat.tokens)
        taken.blocks = [self.free.pop() for _ in seat.blocks]
        taken.done = seat.done
        self.grown.append((taken.slot, taken.blocks.copy()))
        return taken

    def go_on(self, seat: Seat, chunk: int = 5) -> Seat:
        """To its max_tokens, nothing else running."""
        while len(seat.results) < seat.params.max_tokens - len(seat.outputs):
            self.step([seat], chunk)
        return seat

    def generate(
        self, prompts: list[list[int]], params: SamplingParams, *, chunk: int = 16, at_once: int = 9
    ) -> list[Seat]:
        """All prompts to their max_tokens, `at_once` at a time, a new one with each that ends."""
        waiting = list(prompts)
        seats: list[Seat] = []
        running: list[Seat] = []
        while waiting or running:
            while waiting and len(running) < at_once:
                running.append(self.enter(waiting.pop(0), params))
                seats.append(running[-1])
            self.step(running, chunk)
            for seat in [s for s in running if len(s.results) == params.max_tokens]:
                running.remove(seat)
                self.leave(seat)
        return seats
