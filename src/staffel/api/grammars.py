"""Whether a client's grammar can be used: found out in a process that may be lost over it."""

from __future__ import annotations

import asyncio
import contextlib
import select
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b

from staffel.api.errors import ApiError
from staffel.api.grammar_worker import read_message, write_message
from staffel.api.limits import Limits
from staffel.config import ModelSpec

_LARGE_BYTES = 16 << 10
_KEPT_ANSWERS = 4096
_MOST_WAITING = 64
"""In a lane; more get a 429."""
_START_S = 60.0


class Grammars:
    """Checks grammars, each once. Small ones don't wait for large ones."""

    def __init__(self, model: ModelSpec, limits: Limits) -> None:
        self._limits = limits
        self._lanes = [_Lane(model, limits), _Lane(model, limits)]
        self._known: OrderedDict[bytes, str | None] = OrderedDict()

    def warm_up(self) -> None:
        """Start a process for the first small grammar; returns at once."""
        self._lanes[0].warm_up()

    async def problem(self, grammar: str) -> str | None:
        """What is wrong with a grammar; None: instances can use it.

        One that nobody waits for any more isn't compiled to its end.

        Raises:
            ApiError: 429 where too many wait already.
        """
        key = blake2b(grammar.encode(), digest_size=16).digest()
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        found = await self._lanes[len(grammar) >= _LARGE_BYTES].problem(grammar)
        self._known[key] = found
        if len(self._known) > _KEPT_ANSWERS:
            self._known.popitem(last=False)
        return found

    def close(self) -> None:
        for lane in self._lanes:
            lane.close()


class _Job:
    """One grammar on its way."""

    def __init__(self, grammar: str) -> None:
        self.grammar = grammar
        self.given_up = False


class _Lane:
    """One process and a queue in front of it, worked off by a thread."""

    def __init__(self, model: ModelSpec, limits: Limits) -> None:
        self._command = [
            *(sys.executable, "-m", "staffel.api.grammar_worker"),
            *(str(model.path), str(limits.grammar_timeout)),
            *map(str, model.eos_ids),
        ]
        self._timeout = limits.grammar_timeout
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._waiting = 0
        self._lock = threading.Lock()
        """Of what follows."""
        self._job: _Job | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def warm_up(self) -> None:
        self._thread.submit(self._started)

    async def problem(self, grammar: str) -> str | None:
        if self._waiting >= _MOST_WAITING:
            text = "too many schemas are waiting to be compiled"
            raise ApiError(429, text, code=429, retry_after=round(self._timeout) or 1)
        job = _Job(grammar)
        self._waiting += 1
        try:
            return await asyncio.wrap_future(self._thread.submit(self._work, job))
        except asyncio.CancelledError:
            self._give_up(job)
            raise
        finally:
            self._waiting -= 1

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._kill()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _give_up(self, job: _Job) -> None:
        with self._lock:
            job.given_up = True
            if self._job is job:
                self._kill()

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    # ---- in the thread

    def _work(self, job: _Job) -> str | None:
        process, refusal = self._started()
        if process is None:
            return refusal
        with self._lock:
            if job.given_up or self._closed:
                return "given up"
            self._job = job
        try:
            answer = self._ask(process, job.grammar)
        finally:
            with self._lock:
                self._job = None
        return self._bury(process) if answer is None else answer.decode() or None

    def _ask(self, process: subprocess.Popen[bytes], grammar: str) -> bytes | None:
        """The answer; None: the process is lost, or took too long and was killed."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            write_message(process.stdin.fileno(), grammar.encode())
        except OSError:
            return None
        return self._read(process, self._timeout)

    def _read(self, process: subprocess.Popen[bytes], seconds: float) -> bytes | None:
        assert process.stdout is not None
        if select.select([process.stdout], [], [], seconds)[0]:
            return read_message(process.stdout.fileno())
        process.kill()
        process.wait()
        process.returncode = -signal.SIGALRM  # however it ended: it was for the time
        return None

    def _bury(self, process: subprocess.Popen[bytes]) -> str:
        """Clear away a process that is lost; what that says of its grammar."""
        with self._lock:
            self._process = None
        code = process.returncode if process.returncode is not None else process.wait()
        _close_pipes(process)
        if code == -signal.SIGALRM:
            return f"it takes longer than {self._timeout:g} s to compile (--grammar-timeout)"
        return "it is too much for the grammar library, which fails over it"

    def _started(self) -> tuple[subprocess.Popen[bytes] | None, str | None]:
        """The process, started if there is none; or why there can't be one."""
        with self._lock:
            if self._closed:
                return None, "the server is stopping"
            if self._process is not None and self._process.poll() is None:
                return self._process, None
            process = self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,  # Ctrl-C in a terminal is for the server
            )
        greeting = self._read(process, _START_S)
        if greeting == b"":
            return process, None
        self._bury_unstarted(process)
        return None, (greeting or b"the process that compiles grammars can't be started").decode()

    def _bury_unstarted(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._process = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1)
        process.kill()
        process.wait()
        _close_pipes(process)


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
