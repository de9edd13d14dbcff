"""Throws all kinds of inputs at the HTTP server, and looks whether anybody else feels it.

    python scripts/fuzz_http.py [--inputs 100000] [--seed 0] [--url URL] [--workers 32] [--bound 30]
    python scripts/fuzz_http.py --seed 0 --only 4711

Without --url a server of its own is started, 1P1D with the default model. Inputs are JSON schemas,
request bodies, heads, and clients that leave (fuzz_inputs.py); number i depends on the seed and on
i alone, and --only repeats it and shows what was sent and what came back. Meanwhile /health is
asked all the time, and a stream runs again and again whose text must stay the same.

The last line says the outcome. These fail the run: an answer of 500 and above other than 503, a
process that ended or a stream that broke off (crash), no end of an answer within --bound (hang), an
answer that is no HTTP or an error without a message (malformed), and a text that doesn't follow its
schema (wrong). Ctrl-C ends it early with the same lines.
"""

from __future__ import annotations

import argparse
import contextlib
import select
import socket
import struct
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fuzz_answers import Answer, Fault, Reply, answers_of, check
from fuzz_inputs import Input, Leaving, make_input
from fuzz_watch import Health, Processes, Stranger, pid_of

from tests.e2e.server import Server

OPTIONS = ("--max-model-len", "1024", "--kv-memory", "256MiB", "--threads", "1")
"""Of the server that the fuzzer starts."""
BOUND_S = 30.0
WORKERS = 32
"""Inputs at a time: instances compute many prompts in nearly the time of one."""
_MOST_SHOWN = 50
_SHOWN_BYTES = 4000
_LATE_S = 0.5
"""How long the observers go on after the last input: for what comes late."""
_PROGRESS_S = 10.0
_TURN_S = 0.25
"""How often somebody who waits looks whether the run is to end."""


@dataclass
class Result:
    """What a run found."""

    inputs: int = 0
    seconds: float = 0.0
    statuses: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    """By kind; see Fault."""
    shown: list[str] = field(default_factory=list)
    """The first faults, a line each."""
    slowest_input: tuple[float, int] = (0.0, -1)
    """Seconds, and its number; of those that wait for their answer."""
    slowest_health: float = 0.0
    longest_gap: float = 0.0
    slowest_first: float = 0.0
    streams: int = 0
    memory_before: int = 0
    memory_after: int = 0

    @property
    def good(self) -> bool:
        return not self.faults

    def lines(self) -> Iterator[str]:
        """The report; the last line is for programs too."""
        statuses = sorted(self.statuses.items())
        yield "statuses: " + " ".join(f"{status}={count}" for status, count in statuses)
        yield f"status_503={self.statuses['503']}"
        yield f"malformed={self.faults['malformed']} wrong={self.faults['wrong']}"
        yield (
            f"slowest input: {self.slowest_input[1]} with {self.slowest_input[0]:.2f} s; others' "
            f"streams: {self.streams}, slowest first chunk {self.slowest_first:.2f} s"
        )
        before, after = self.memory_before / 2**20, self.memory_after / 2**20
        yield f"memory of the server: {before:.1f} MiB before, {after:.1f} MiB after"
        yield f"{self.seconds:.1f} s, {self.inputs / max(self.seconds, 1e-9):.0f} inputs a second"
        yield self.summary()

    def summary(self) -> str:
        return (
            f"inputs={self.inputs} status_5xx={self.faults['status_5xx']} "
            f"crashes={self.faults['crash']} hangs={self.faults['hang']} "
            f"slowest_health_s={self.slowest_health:.3f} "
            f"longest_gap_of_others_s={self.longest_gap:.3f}"
        )


# ---- one client


def exchange(
    address: tuple[str, int], sent: Input, bound: float, stop: threading.Event | None = None
) -> Reply:
    """Send an input and take what comes back, until one of the two sides closes."""
    began = time.monotonic()
    try:
        connection = socket.create_connection(address, timeout=bound)
    except OSError as error:
        return Reply(trouble=repr(error), seconds=time.monotonic() - began)
    with connection:
        connection.setblocking(False)
        leaving = sent.leaving or Leaving(seconds=bound)
        data, ended = _talk(connection, sent.data, leaving, began, stop)
        if leaving.reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    seconds = time.monotonic() - began
    late = not ended and sent.leaving is None and seconds >= bound
    return Reply(data, ended, late, seconds=seconds)


def _talk(
    connection: socket.socket,
    unsent: bytes,
    leaving: Leaving,
    began: float,
    stop: threading.Event | None,
) -> tuple[bytes, bool]:
    """What came back, and whether the server closed."""
    received = bytearray()
    while unsent or len(received) <= leaving.bytes:
        left = began + leaving.seconds - time.monotonic()
        # Whoever leaves at once has sent everything nonetheless, if the server takes it.
        if (left <= 0 and not unsent) or left < -1 or (stop is not None and stop.is_set()):
            break
        writes = [connection] if unsent else []
        readable, writable, _ = select.select([connection], writes, [], min(max(left, 0), _TURN_S))
        try:
            if writable:
                unsent = unsent[connection.send(unsent) :]
            if readable:
                part = connection.recv(1 << 16)
                if not part:
                    return bytes(received), True
                received += part
        except BlockingIOError:
            continue
        except OSError:  # it closed without having read everything
            return bytes(received), True
    return bytes(received), False


# ---- all of them


class Fuzzing:
    """One run: senders, observers, and what they find."""

    def __init__(self, url: str, pid: int | None, seed: int, bound: float) -> None:
        parts = urlsplit(url)
        self.result = Result()
        self._address = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._seed = seed
        self._bound = bound
        self._lock = threading.Lock()
        """Of the result and of what is under way."""
        self._recent: deque[int] = deque(maxlen=128)
        """The inputs that were sent last: one of them may be what a process ended over."""
        self._no_more = threading.Event()
        """Set when no further input is to be sent."""
        self._health = Health(url, bound, self._report)
        self._stranger = Stranger(url, bound, self._report)
        self._processes = None if pid is None else Processes(pid, self._report, self._process_ended)

    def run(self, inputs: int, workers: int) -> Result:
        """Send them all; KeyboardInterrupt ends it early."""
        try:
            self._stranger.begin()
            self.result.memory_before = self._memory
            with self._observers():
                self._send(inputs, workers)
                time.sleep(_LATE_S)
        except KeyboardInterrupt:
            print("ending early", file=sys.stderr)
        self._conclude()
        return self.result

    def _send(self, inputs: int, workers: int) -> None:
        numbers = iter(range(inputs))
        senders = [threading.Thread(target=self._send_all, args=(numbers,)) for _ in range(workers)]
        began = time.monotonic()
        for sender in senders:
            sender.start()
        try:
            self._wait(senders, began)
        finally:
            self._no_more.set()
            for sender in senders:
                sender.join()
            self.result.seconds = time.monotonic() - began

    def _wait(self, senders: list[threading.Thread], began: float) -> None:
        told = began
        while any(sender.is_alive() for sender in senders):
            time.sleep(0.05)
            now = time.monotonic()
            if now - told >= _PROGRESS_S:
                told, done = now, self.result.inputs
                print(f"{done} inputs, {done / (now - began):.0f}/s", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def _observers(self) -> Iterator[None]:
        stop = threading.Event()
        watches = [self._health.watch, self._stranger.watch]
        if self._processes is not None:
            watches.append(self._processes.watch)
        threads = [threading.Thread(target=watch, args=(stop,), daemon=True) for watch in watches]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join(self._bound)

    def _conclude(self) -> None:
        if self._processes is not None:
            self._processes.look()
        self.result.memory_after = self._memory
        self.result.slowest_health = self._health.slowest
        self.result.longest_gap = self._stranger.longest_gap
        self.result.slowest_first = self._stranger.slowest_first
        self.result.streams = self._stranger.streams

    @property
    def _memory(self) -> int:
        return 0 if self._processes is None else self._processes.memory

    # ---- in the senders' threads

    def _send_all(self, numbers: Iterator[int]) -> None:
        while not self._no_more.is_set():
            with self._lock:
                number = next(numbers, None)
                if number is None:
                    return
                self._recent.append(number)
            sent = make_input(self._seed, number)
            reply = exchange(self._address, sent, self._bound, self._no_more)
            self._take(sent, reply)

    def _take(self, sent: Input, reply: Reply) -> None:
        statuses, faults = judged(sent, reply)
        with self._lock:
            self.result.inputs += 1
            self.result.statuses.update(statuses)
            if sent.leaving is None:
                slow = (reply.seconds, sent.number)
                self.result.slowest_input = max(self.result.slowest_input, slow)
        if self._no_more.is_set() and reply.trouble:
            return  # the server has ended, which is reported already
        for fault in faults:
            self._report(fault, sent.number)

    # ---- in all threads

    def _report(self, fault: Fault, number: int | None = None) -> None:
        source = "an observer" if number is None else f"input {number}"
        line = f"{fault.kind}, {source}: {fault.what}"
        with self._lock:
            self.result.faults[fault.kind] += 1
            if len(self.result.shown) < _MOST_SHOWN:
                self.result.shown.append(line)
                print(line, flush=True)

    def _process_ended(self) -> None:
        """What comes after it would tell nothing."""
        with self._lock:
            recent = " ".join(map(str, self._recent))
        print(f"the run ends; inputs sent last: {recent}", flush=True)
        self._no_more.set()


def judged(sent: Input, reply: Reply) -> tuple[list[str], list[Fault]]:
    """The statuses in a reply, and all that is wrong with it."""
    answers: list[Answer] = []
    try:
        answers = answers_of(reply, to_head=sent.data.startswith(b"HEAD "))
    except (ValueError, IndexError) as error:
        return ["no HTTP"], [Fault("malformed", str(error))]
    statuses = [str(answer.status) for answer in answers]
    return statuses or ["none"], list(check(sent, reply, answers))


def fuzz(
    url: str,
    pid: int | None,
    *,
    inputs: int,
    seed: int = 0,
    workers: int = WORKERS,
    bound: float = BOUND_S,
) -> Result:
    """Send that many inputs to the server at `url`, whose process is `pid` if it can be watched."""
    return Fuzzing(url, pid, seed, bound).run(inputs, workers)


# ---- the command


def repeat(url: str, seed: int, number: int, bound: float) -> bool:
    """Send one input and print it all; whether nothing is wrong."""
    sent = make_input(seed, number)
    stays = "until the end" if sent.leaving is None else f"for {sent.leaving}"
    print(f"input {number} of seed {seed}: {sent.kind}, {len(sent.data)} bytes, stays {stays}")
    print(_shown(sent.data))
    parts = urlsplit(url)
    reply = exchange((parts.hostname or "127.0.0.1", parts.port or 80), sent, bound)
    end = "the server closed" if reply.ended else "the client closed"
    print(f"---- after {reply.seconds:.3f} s {end}; {len(reply.data)} bytes came back")
    print(_shown(reply.data))
    _, faults = judged(sent, reply)
    for fault in faults:
        print(f"{fault.kind}: {fault.what}")
    return not faults


def _shown(data: bytes) -> str:
    text = data[:_SHOWN_BYTES].decode("utf-8", "backslashreplace")
    more = len(data) - _SHOWN_BYTES
    return text + (f"… and {more} bytes more" if more > 0 else "")


@contextlib.contextmanager
def running_server(options: argparse.Namespace) -> Iterator[tuple[str, int | None]]:
    """The URL and process of the server to use."""
    if options.url is not None:
        yield options.url.rstrip("/"), pid_of(options.url)
        return
    folder = Path(tempfile.mkdtemp(prefix="staffel-fuzz-"))
    with Server(folder, *OPTIONS) as server:
        print(f"server at {server.url}, its log in {folder / 'err'}", flush=True)
        yield server.url, server.process.pid


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--url", help="of a server that runs already")
    parser.add_argument("--bound", type=float, default=BOUND_S, help="seconds of an answer")
    parser.add_argument("--workers", type=int, default=WORKERS, help="inputs at a time")
    parser.add_argument("--only", type=int, metavar="I", help="send this input alone, and show it")
    options = parser.parse_args()
    with running_server(options) as (url, pid):
        if options.only is not None:
            sys.exit(not repeat(url, options.seed, options.only, options.bound))
        result = fuzz(
            url,
            pid,
            inputs=options.inputs,
            seed=options.seed,
            workers=options.workers,
            bound=options.bound,
        )
    print("\n".join(result.lines()))
    sys.exit(not result.good)


if __name__ == "__main__":
    main()
