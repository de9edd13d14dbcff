"""Starting stations (`staffel.model.station`) and talking to them; needs no torch itself."""

from __future__ import annotations

import subprocess
import sys
from types import TracebackType
from typing import TypeVar

import msgspec

from staffel.config import ConfigError
from staffel.control.messages import KvRegion
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
    Rest,
    Setup,
    Took,
    Unfit,
)
from staffel.threads import environment

A = TypeVar("A", Ready, Took, Done)


class Station:
    """A station's process. As a context it is ended, however its owner fares."""

    def __init__(self, setup: Setup) -> None:
        """Start it; it loads the model meanwhile (`ready`)."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "staffel.model.station"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(setup.threads),
            start_new_session=True,  # Ctrl-C in a terminal is for its owner
        )
        self._send(setup)

    def __enter__(self) -> Station:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def ready(self) -> Ready:
        """Wait until the model is loaded. Raises ConfigError where it can't be."""
        return self._answer(Ready)

    def measure(self, shape: BatchShape) -> float:
        """Seconds of one step."""
        return self._ask(Measure(shape), Took).seconds

    def copy(self, blocks: int) -> float:
        """Seconds of copying so many blocks from the attached peer."""
        return self._ask(Copy(blocks), Took).seconds

    def attach(self, region: KvRegion) -> None:
        self._ask(AttachPeer(region), Done)

    def repeat(self, shape: BatchShape) -> None:
        """Keep it busy with that shape, until the next command."""
        self._ask(Repeat(shape), Done)

    def rest(self) -> None:
        self._ask(Rest(), Done)

    def _ask(self, command: Command, kind: type[A]) -> A:
        self._send(command)
        return self._answer(kind)

    def _send(self, command: Command) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(command) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # what it says, or that it says nothing, comes out when it is asked

    def _answer(self, kind: type[A]) -> A:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ConfigError("the process that measures has died; its last words are above")
        answer = msgspec.json.decode(line, type=Answer)
        if isinstance(answer, Unfit):
            raise ConfigError(answer.message)
        assert isinstance(answer, kind)
        return answer
