"""A process that times steps of an executor, as it is told over its standard streams.

One JSON line per command, one per answer. It is a process of its own, as instances are, so that
it has their thread pools and cores, and so that two can run beside each other.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Iterator
from itertools import count
from time import perf_counter
from typing import Any, BinaryIO

import msgspec
import numpy as np

from staffel.config import ConfigError
from staffel.control.messages import Batch, BatchResult, Enter, ReadChunk, Row
from staffel.control.request import SamplingParams
from staffel.model.executor import Executor, GpuUse
from staffel.model.shapes import BatchShape
from staffel.model.timing import (
    Answer,
    AttachPeer,
    Command,
    Copy,
    Done,
    Measure,
    Ready,
    Repeat,
    Setup,
    Took,
    Unfit,
)

_PEER = ("peer", 1)
_PARAMS = SamplingParams(max_tokens=1 << 20)
"""Drawn at temperature 1, as the API does where nothing is asked for."""

_NOTHING = Batch(id=0, leaves=[], enters=[], grown=[], reads=[], decodes=[], rows=[])

# ---- what is timed


class Stage:
    """An executor with made-up sequences, of which nothing is left after each step."""

    def __init__(self, executor: Executor, vocab_size: int) -> None:
        self._executor = executor
        self._region = executor.region
        self._vocab_size = vocab_size
        self._random = np.random.default_rng(0)
        self._dispatches = count(1)
        self._blocks = self._round_robin()

    def _round_robin(self) -> Iterator[int]:
        """Blocks in turn, so that none is in a processor's cache from the step before."""
        while True:
            yield from range(self._region.num_blocks)

    def time_step(self, shape: BatchShape) -> float:
        """Seconds of one step of that shape, from the prompts' entry to the drawn tokens.

        Decoding sequences are in their slots before, as they are while they run.
        """
        decodes = list(range(shape.decodes))
        prompts = list(range(shape.decodes, shape.decodes + shape.prompts))
        whole = shape.cached + shape.new
        self._run(**self._entry(decodes, shape.context))
        rows = [Row(slot, shape.cached, shape.new, True) for slot in prompts]
        seconds, _ = self._run(**self._entry(prompts, whole), decodes=decodes, rows=rows)
        self._run(leaves=decodes + prompts)
        return seconds

    def time_copy(self, blocks: int) -> float:
        """Seconds of a step that copies so many of the peer's blocks.

        Raises:
            ConfigError: the peer's blocks can't be read.
        """
        taken = self._take(blocks)
        chunk = ReadChunk(*_PEER, taken, taken, (0, 0))
        seconds, result = self._run(reads=[chunk])
        if result.reads != [True]:
            raise ConfigError("transfer: one instance's KV can't be read by another here")
        return seconds

    def _entry(self, slots: list[int], tokens: int) -> dict[str, Any]:
        """What a batch says of sequences that take those slots, with `tokens` random ids each."""
        blocks = -(-tokens // self._region.block_size)
        return {
            "enters": [self._enter(slot, tokens) for slot in slots],
            "grown": [(slot, self._take(blocks)) for slot in slots],
        }

    def _enter(self, slot: int, tokens: int) -> Enter:
        ids = self._random.integers(0, self._vocab_size, tokens).tolist()
        return Enter(slot, next(self._dispatches), ids, tokens, _PARAMS)

    def _take(self, blocks: int) -> list[int]:
        return [next(self._blocks) for _ in range(blocks)]

    def _run(self, **parts: Any) -> tuple[float, BatchResult]:
        batch = msgspec.structs.replace(_NOTHING, **parts)
        start = perf_counter()
        result = self._executor.execute(batch)
        return perf_counter() - start, result


# ---- the process


class _Session:
    def __init__(self, executor: Executor, stage: Stage) -> None:
        self._executor = executor
        self._stage = stage
        self._repeated: BatchShape | None = None

    def obey(self, command: Command) -> Answer:
        self._repeated = None
        match command:
            case Measure(shape=shape):
                return Took(self._stage.time_step(shape))
            case Copy(blocks=blocks):
                return Took(self._stage.time_copy(blocks))
            case AttachPeer(region=region):
                self._executor.attach(*_PEER, region)
            case Repeat(shape=shape):
                self._repeated = shape
                self.go_on()
        return Done()

    def go_on(self) -> bool:
        """Once more what is to be repeated. False: nothing is."""
        if self._repeated is None:
            return False
        self._stage.time_step(self._repeated)
        return True


def _make_executor(setup: Setup) -> Executor:
    return Executor(
        setup.model,
        kv_bytes=setup.spec.kv_bytes,
        chunk_tokens=setup.spec.chunk_tokens,
        gpu=GpuUse(
            *setup.gpu_turn, utilization=setup.spec.gpu_share, graphs=setup.spec.cuda_graphs
        ),
        block_size=setup.spec.block_size,
        max_sequences=setup.spec.max_sequences,
        device=setup.spec.device,
        dtype=setup.spec.dtype,
        quantization=setup.spec.quantization,
        threads=setup.threads,
    )


def serve(commands: BinaryIO, answers: BinaryIO) -> None:
    """Obey until the commands end. What goes wrong is answered, and ends it."""

    def answer(message: Answer) -> None:
        answers.write(msgspec.json.encode(message) + b"\n")
        answers.flush()

    try:
        setup = msgspec.json.decode(commands.readline(), type=Setup)
        if setup.cores is not None:
            os.sched_setaffinity(0, setup.cores)
        executor = _make_executor(setup)
        answer(Ready(executor.region))
        session = _Session(executor, Stage(executor, setup.model.vocab_size))
        for command in _commands(commands, session):
            answer(session.obey(command))
    except ConfigError as error:
        answer(Unfit(str(error)))


def _commands(lines: BinaryIO, session: _Session) -> Iterator[Command]:
    """Each command as it comes, and the repeated step meanwhile.

    Whoever commands waits for each answer, so no second line hides in the stream's buffer.
    """
    decoder = msgspec.json.Decoder(Command)
    while True:
        while not select.select([lines], [], [], 0)[0] and session.go_on():
            pass
        line = lines.readline()
        if not line:
            return
        yield decoder.decode(line)


def main() -> None:
    # Ctrl-C in a terminal is for the one who commands; the end of the commands ends this.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no answer
    serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
