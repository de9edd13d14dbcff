"""The load generator: one open-loop run against one endpoint.

    generator = await run_load(endpoint, plan, on_record=records.append, duration=60)

Requests go out when the plan says, whatever the server does. A server that falls behind thus gets
a growing backlog, as from real users, and not the mercy of a client that waits for it.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from statistics import median
from time import perf_counter, process_time
from typing import Protocol

from staffel.bench.client import Planned
from staffel.bench.endpoint import Endpoint
from staffel.bench.fleet import LEAD, Fleet
from staffel.bench.records import Record
from staffel.bench.results import Generator
from staffel.bench.sender import Counts, Effort, Sender
from staffel.bench.workload import Ask
from staffel.config import ConfigError

MAX_DELAY = 0.005
"""Seconds of the generator's own delay that are always good enough."""
DELAY_SHARE = 0.05
"""Share of the median TTFT that its delay may have beyond that."""
CHUNKS_PER_PROCESS = 10_000
"""Chunks per second that one process is given: about a third of what one core can read."""
_PROGRESS = 0.25
_PEEK = 200


async def run_load(
    endpoint: Endpoint,
    plan: Iterable[tuple[float, Ask]],
    *,
    on_record: Callable[[Record], bool | None],
    on_progress: Callable[[Counts], bool | None] | None = None,
    duration: float | None = None,
    requests: int | None = None,
    stop: asyncio.Event | None = None,
    processes: int | None = None,
) -> Generator:
    """Send the plan, wait until every request has ended, and say how well the sending went.

    Args:
        plan: (seconds from the start, what to ask), in order of time; may be endless. It is drawn
            from up to five seconds ahead.
        on_record: gets each request's record at its end. Order is that of the ends. Returning
            True stops the run.
        on_progress: called four times a second; returning True stops the run.
        duration: requests scheduled at or after this many seconds aren't sent.
        requests: at most so many are sent.
        stop: set it to stop the run; it is also set where a callback stops it. Then nothing more
            is sent, what is in flight is closed, and its records have `ended` None.
        processes: that send. 0: this one, whose event loop must have nothing else to do, and
            whose garbage collector holds up thousands of streams; None: as many as the plan's
            first requests make necessary.

    Returns:
        The generator's own figures; `kept_up` is False where they spoil the measurement, by the
        rule of `judge`.

    Raises:
        ConfigError: nothing to send, or a prompt that the API can't take.
    """
    stop = stop or asyncio.Event()
    peeked, rest = _peek(_planned(plan, duration, requests))
    if not peeked:
        raise ConfigError(
            "--duration: no request falls into it; make it longer, or the rate higher"
        )
    endpoint.request(peeked[0].ask)
    processes = processes_for(peeked) if processes is None else processes
    return await _Run(on_record, on_progress, stop).go(endpoint, rest, processes)


class _Run:
    """What is collected during one run."""

    def __init__(
        self,
        on_record: Callable[[Record], bool | None],
        on_progress: Callable[[Counts], bool | None] | None,
        stop: asyncio.Event,
    ) -> None:
        self._on_record = on_record
        self._on_progress = on_progress
        self._stop = stop
        self._ttfts: list[float] = []

    async def go(self, endpoint: Endpoint, plan: Iterator[Planned], processes: int) -> Generator:
        shell = Fleet(processes, endpoint) if processes else _Here(endpoint)
        cpu, started = process_time(), perf_counter()
        progress = asyncio.create_task(self._report(shell))
        try:
            efforts = await shell.run(plan, self._record, self._stop)
        finally:
            progress.cancel()
        # A sender in this process is in this process's time already.
        spent = process_time() - cpu + sum(effort.cpu for effort in efforts if processes)
        return judge(efforts, self._ttfts, spent / (perf_counter() - started), max(processes, 1))

    def _record(self, record: Record) -> None:
        if record.ttft is not None:
            self._ttfts.append(record.ttft)
        if self._on_record(record):
            self._stop.set()

    async def _report(self, shell: _Shell) -> None:
        while self._on_progress is not None:
            await asyncio.sleep(_PROGRESS)
            if self._on_progress(shell.counts):
                self._stop.set()


class _Shell(Protocol):
    """Something that sends a plan."""

    @property
    def counts(self) -> Counts: ...

    async def run(
        self, plan: Iterator[Planned], on_record: Callable[[Record], None], stop: asyncio.Event
    ) -> list[Effort]: ...


class _Here:
    """A sender in this process."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._sender = Sender(endpoint)

    @property
    def counts(self) -> Counts:
        return self._sender.counts

    async def run(
        self, plan: Iterator[Planned], on_record: Callable[[Record], None], stop: asyncio.Event
    ) -> list[Effort]:
        origin = perf_counter() + LEAD
        return [await self._sender.run(_asynchronous(plan), origin, on_record, stop)]


def judge(
    efforts: Sequence[Effort], ttfts: Sequence[float], cpu_share: float, processes: int
) -> Generator:
    """The generator's figures over all its processes.

    Its delay is the larger of two 99th percentiles (nearest rank): lateness (scheduled time to
    when the connection began to be opened; connecting itself is the server's and the network's)
    and the event loop's lag, by which time stamps may be late. It has not kept up when this delay
    is above 5 ms *and* above 5 % of the median TTFT: then the tail of the measured latencies is
    partly its own. Nor has it when any request couldn't be sent for want of something on this
    machine (open files, ports, memory).
    """
    lateness = _p99([late for effort in efforts for late in effort.lateness])
    lag = _p99([late for effort in efforts for late in effort.lags])
    faults = [fault for effort in efforts for fault in effort.faults]
    allowed = max(MAX_DELAY, DELAY_SHARE * median(ttfts) if ttfts else 0.0)
    trouble = _trouble(max(lateness, lag), allowed, faults)
    return Generator(
        lateness_p99=lateness,
        lag_p99=lag,
        cpu_share=cpu_share,
        processes=processes,
        kept_up=trouble is None,
        trouble=trouble,
    )


def _trouble(delay: float, allowed: float, faults: Sequence[str]) -> str | None:
    if faults:
        fault, _ = Counter(faults).most_common(1)[0]
        return (
            f"{len(faults)} requests could not be sent for want of something on this machine: "
            f"{fault}; raise its limits (ulimit -n, net.ipv4.ip_local_port_range)"
        )
    if delay > allowed:
        return (
            f"the load generator ran {delay * 1e3:.1f} ms behind (P99; {allowed * 1e3:.1f} ms are "
            "fine): give it more --processes, or a machine that the server doesn't use up"
        )
    return None


def processes_for(plan: Sequence[Planned]) -> int:
    """Processes for a plan that goes on like this: by its chunks per second, one per token."""
    span = plan[-1].at - plan[0].at
    if span <= 0:
        return 1
    tokens = sum(planned.ask.output_tokens for planned in plan[1:])
    needed = -(-tokens // round(span * CHUNKS_PER_PROCESS + 1))
    return max(1, min(needed, len(os.sched_getaffinity(0))))


def _p99(values: list[float]) -> float:
    values.sort()
    return values[-(-99 * len(values) // 100) - 1] if values else 0.0


def _planned(
    plan: Iterable[tuple[float, Ask]], duration: float | None, requests: int | None
) -> Iterator[Planned]:
    for index, (at, ask) in enumerate(itertools.islice(plan, requests)):
        if duration is not None and at >= duration:
            return
        yield Planned(index, at, ask)


def _peek(plan: Iterator[Planned]) -> tuple[list[Planned], Iterator[Planned]]:
    """The plan's first requests, and the whole of it."""
    first = list(itertools.islice(plan, _PEEK))
    return first, itertools.chain(first, plan)


async def _asynchronous(plan: Iterator[Planned]) -> AsyncIterator[Planned]:
    for planned in plan:
        yield planned
