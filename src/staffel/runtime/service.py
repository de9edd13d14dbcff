"""The service: the router's live shell. Requests in, streams of tokens out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from staffel.config import ConfigError
from staffel.control.fleet import FleetActions, FleetConfig, FleetCore, Life, MemberState
from staffel.control.jobs import Summary
from staffel.control.journal import record
from staffel.control.messages import (
    UNAVAILABLE_RETRY_S,
    Beat,
    Delta,
    Deltas,
    Failure,
    FromInstance,
    Hello,
    Load,
    Report,
    RouterConfig,
    Unable,
)
from staffel.control.request import Request
from staffel.control.router import Actions, RouterCore
from staffel.runtime.folder import ServerFolder
from staffel.runtime.instance import InstanceJob
from staffel.runtime.journal_file import JournalFile
from staffel.runtime.launcher import Handle, Launcher
from staffel.runtime.links import RouterLink

log = logging.getLogger("staffel.service")
request_log = logging.getLogger("staffel.request")

State = Literal["starting", "ready", "draining", "degraded"]

_TICK_S = 0.25


class Stream:
    """The news of one request, ending with a Delta that has `finish`, or with a Failure."""

    def __init__(self) -> None:
        self._news: asyncio.Queue[Delta | Failure] = asyncio.Queue()
        self._over = False

    def put(self, news: Delta | Failure) -> None:
        self._news.put_nowait(news)

    def __aiter__(self) -> AsyncIterator[Delta | Failure]:
        return self

    async def __anext__(self) -> Delta | Failure:
        if self._over:
            raise StopAsyncIteration
        news = await self._news.get()
        self._over = isinstance(news, Failure) or news.finish is not None
        return news


class InstanceStatus(msgspec.Struct, frozen=True):
    """An instance as metrics and /ready show it."""

    instance: str
    role: str
    state: MemberState
    restarts: int
    reason: str
    """Why it isn't ready, where that is known."""
    load: Load | None

    @property
    def ready(self) -> bool:
        return self.state == "ready"


class Service:
    """Runs the instances of a placement and the router over them."""

    def __init__(
        self,
        jobs: Sequence[InstanceJob],
        launcher: Launcher,
        config: RouterConfig,
        *,
        folder: ServerFolder,
        hang_timeout: float = 0,
        journal: Path | None = None,
    ) -> None:
        """`hang_timeout`: an instance without a sign of progress for so many seconds is killed and
        replaced; 0: never."""
        self._jobs = {job.name: job for job in jobs}
        self._launcher = launcher
        self._folder = folder
        self._link = RouterLink(endpoint(folder.path))
        self._core = RouterCore(config)
        self._fleet = FleetCore(_fleet_config(jobs, hang_timeout))
        self._journal = JournalFile(journal) if journal is not None else None
        if self._journal is not None:
            record(self._core, "router", "router", self._journal.append)
            record(self._fleet, "fleet", "fleet", self._journal.append)
        self._streams: dict[str, Stream] = {}
        self._handles: dict[Life, Handle] = {}
        self._loads: dict[str, Load] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._draining = False
        self._stopped = False
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._quiet = asyncio.Event()
        self._quiet.set()

    # ---- life

    async def start(self) -> None:
        """Start all instances and wait until each has said that it is ready.

        Raises ConfigError where one can't start, with its reason; then all have been stopped.
        """
        self._keep_running(self._receive_forever())
        self._keep_running(self._tick_forever())
        try:
            self._see_to(self._fleet.start(time.monotonic_ns()))
            await self._started
        except BaseException:
            await self.stop()
            raise

    def drain(self) -> None:
        """Take no new requests; running ones go on."""
        self._draining = True
        self._see_to(self._fleet.drain(time.monotonic_ns()))

    async def failed(self) -> None:
        """Raises when the router itself fails, which no request survives; else never returns."""
        await self._failed

    async def drained(self) -> None:
        """Return when no request is running."""
        await self._quiet.wait()

    async def stop(self) -> None:
        """End all instances and close everything. Streams that still run get a Failure."""
        if self._stopped:
            return
        self._stopped = True
        self.drain()
        for task in self._tasks:
            task.cancel()
        for name in list(self._streams):
            self._deliver(Failure(name, 503, "the server is stopping", UNAVAILABLE_RETRY_S))
        await asyncio.gather(*(handle.stop() for handle in self._handles.values()))
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._link.close()
        if self._journal is not None:
            self._journal.close()
        self._folder.close()

    def state(self) -> State:
        if self._draining:
            return "draining"
        if not self._started.done():
            return "starting"
        return "ready" if self._core.phases else "degraded"

    def status(self) -> list[InstanceStatus]:
        return [
            InstanceStatus(m.name, m.role, m.state, m.restarts, m.reason, self._loads.get(m.name))
            for m in self._fleet.members
        ]

    @property
    def recording(self) -> bool:
        """Whether a journal is written; False once it had to end."""
        return self._journal is not None and not self._journal.ended

    @property
    def queued(self) -> int:
        """Requests that wait in the router."""
        return self._core.queued

    def _keep_running(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        task.add_done_callback(self._note_failure)
        task.add_done_callback(self._tasks.discard)
        self._tasks.add(task)

    def _note_failure(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._failed.done():
            self._failed.set_exception(error)

    # ---- requests

    def submit(self, request: Request) -> Stream:
        """A new request, with an id that no running one has."""
        if request.id in self._streams:
            raise ValueError(f"request id {request.id} is in use")
        stream = Stream()
        refusal = self._refusal()
        if refusal is not None:
            stream.put(Failure(request.id, 503, refusal, UNAVAILABLE_RETRY_S))
            return stream
        self._streams[request.id] = stream
        self._quiet.clear()
        self._act(self._core.submit(request, time.monotonic_ns()))
        return stream

    def cancel(self, request_id: str) -> None:
        """Stop a request and free what it holds; nothing if it has ended."""
        if self._streams.pop(request_id, None) is not None:
            self._act(self._core.cancel(request_id, time.monotonic_ns()))
            self._note_quiet()

    def _refusal(self) -> str | None:
        return {
            "starting": "the server is starting",
            "draining": "the server is shutting down",
            "degraded": "a phase has no instance left",
        }.get(self.state())

    # ---- the router's shell

    def _act(self, actions: Actions) -> None:
        for instance, order in actions.orders:
            self._link.send(instance, order)
        for news in actions.news:
            self._deliver_all(news) if isinstance(news, Deltas) else self._deliver(news)
        for summary in actions.summaries:
            _log_summary(summary)

    def _deliver_all(self, news: Deltas) -> None:
        for request, index, token in zip(news.requests, news.indices, news.ids, strict=True):
            self._deliver(Delta(request, index, [token]))

    def _deliver(self, news: Delta | Failure) -> None:
        stream = self._streams.get(news.request)
        if stream is None:
            return
        stream.put(news)
        if isinstance(news, Failure) or news.finish is not None:
            del self._streams[news.request]
            self._note_quiet()

    def _note_quiet(self) -> None:
        if not self._streams:
            self._quiet.set()

    async def _receive_forever(self) -> None:
        while True:
            self._take(await self._link.receive())

    def _take(self, message: FromInstance) -> None:
        now = time.monotonic_ns()
        match message:
            case Report():
                # Else it is gone, or given up as hung: its last words.
                if self._fleet.serves(message.instance, message.incarnation):
                    self._loads[message.instance] = message.load
                    self._act(self._core.receive(message, now))
            case Hello():
                self._see_to(self._fleet.hello(message, now))
            case Unable():
                log.error("%s: %s", message.instance, message.message)
                self._see_to(self._fleet.unable(message, now))
            case Beat():
                self._see_to(self._fleet.beat(message, now))

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            now = time.monotonic_ns()
            self._see_to(self._fleet.tick(now))
            self._act(self._core.tick(now))

    # ---- the fleet's shell

    def _see_to(self, actions: FleetActions) -> None:
        now = time.monotonic_ns()
        for note in actions.notes:
            log.error("%s", note)
        for life in actions.lost:
            self._loads.pop(life.instance, None)
            self._act(self._core.lost(life.instance, life.incarnation, now))
        for hello in actions.joined:
            log.info("%s is ready", hello.instance)
            self._act(self._core.join(hello, now))
        for life in actions.kills:
            self._handles[life].kill()
        for life in actions.launches:
            self._keep_running(self._live(life))
        if actions.failed is not None and not self._started.done():
            self._started.set_exception(ConfigError(actions.failed))
        elif self._fleet.begun and not self._started.done():
            self._started.set_result(None)

    async def _live(self, life: Life) -> None:
        """From the start of a process to its end."""
        job = msgspec.structs.replace(self._jobs[life.instance], incarnation=life.incarnation)
        try:
            handle = self._handles[life] = await self._launcher.launch(job)
            await handle.wait()
        except OSError as error:  # no memory, or no process to be had
            log.error("%s can't be started: %s", life.instance, error)
        self._handles.pop(life, None)
        log.error("%s has ended", life.instance)
        ended = self._fleet.ended(life.instance, life.incarnation, time.monotonic_ns())
        self._see_to(ended)


def _fleet_config(jobs: Sequence[InstanceJob], hang_timeout: float) -> FleetConfig:
    return FleetConfig(
        members=[(job.name, job.spec.role) for job in jobs],
        # Above all that earlier servers have dealt: their instances may still be there.
        incarnation=time.time_ns(),
        hang_timeout_ns=int(hang_timeout * 1e9),
    )


def _log_summary(summary: Summary) -> None:
    request_log.info("request ended", extra={"fields": msgspec.structs.asdict(summary)})


def endpoint(directory: Path) -> str:
    """Where the router listens for its instances: a socket file that only this user can open."""
    return f"ipc://{directory}/router"
