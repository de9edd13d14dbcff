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
    told: int = 0
    """Blocks that the executor has been told of."""
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

    def run(
        self,
        *,
        leaves: tuple[int, ...] = (),
        enters: tuple[Enter, ...] = (),
        reads: tuple[ReadChunk, ...] = (),
        rows: tuple[Row, ...] = (),
    ) -> BatchResult:
        return self.executor.execute(Batch(0, list(leaves), list(enters), list(reads), list(rows)))

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
        """The seat's next chunk, or its next token."""
        count = min(chunk, seat.known - seat.done)
        end = seat.done + count
        while len(seat.blocks) * self.block_size < end:
            seat.blocks.append(self.free.pop())
        new, seat.told = seat.blocks[seat.told :], len(seat.blocks)
        start, seat.done = seat.done, end
        return Row(seat.slot, start, count, new, end == seat.known and seat.params.max_tokens > 0)

    def step(self, seats: list[Seat], chunk: int) -> None:
        rows = tuple(self.row(seat, chunk) for seat in seats)
        for seat, row, result in zip(seats, rows, self.run(rows=rows).rows, strict=True):
            seat.scores += result.prompt_logprobs or []
            if row.sample:
                seat.results.append(result)

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
