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
from staffel.control.jobs import Summary
from staffel.control.journal import record
from staffel.control.messages import (
    UNAVAILABLE_RETRY_S,
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
_LAST_WORDS_S = 2


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
    """An instance as metrics show it."""

    instance: str
    role: str
    ready: bool
    load: Load | None


class Service:
    """Runs the instances of a placement and the router over them."""

    def __init__(
        self,
        jobs: Sequence[InstanceJob],
        launcher: Launcher,
        config: RouterConfig,
        *,
        folder: ServerFolder,
        journal: Path | None = None,
    ) -> None:
        self._jobs = {job.name: job for job in jobs}
        self._launcher = launcher
        self._folder = folder
        self._link = RouterLink(endpoint(folder.path))
        self._core = RouterCore(config)
        self._journal = JournalFile(journal) if journal is not None else None
        if self._journal is not None:
            record(self._core, "router", "router", self._journal.append)
        self._streams: dict[str, Stream] = {}
        self._handles: dict[str, Handle] = {}
        self._ready: set[str] = set()
        self._loads: dict[str, Load] = {}
        self._tasks: list[asyncio.Task[None]] = []
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
            for job in self._jobs.values():
                self._handles[job.name] = await self._launcher.launch(job)
                self._keep_running(self._watch(job))
            await self._started
        except BaseException:
            await self.stop()
            raise

    def drain(self) -> None:
        """Take no new requests; running ones go on."""
        self._draining = True

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
        self._stopped = self._draining = True
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
            InstanceStatus(name, job.spec.role, name in self._ready, self._loads.get(name))
            for name, job in self._jobs.items()
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
        self._tasks.append(task)

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
        job = self._jobs.get(message.instance)
        if job is None or message.incarnation != job.incarnation:
            return
        now = time.monotonic_ns()
        match message:
            case Report():
                if message.instance in self._ready:  # else it is gone: its last words
                    self._loads[message.instance] = message.load
                self._act(self._core.receive(message, now))
            case Hello():
                log.info("%s is ready", message.instance)
                self._act(self._core.join(message, now))
                self._ready.add(message.instance)
                if len(self._ready) == len(self._jobs) and not self._started.done():
                    self._started.set_result(None)
            case Unable():
                log.error("%s: %s", message.instance, message.message)
                self._refuse_start(message.message)

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._act(self._core.tick(time.monotonic_ns()))

    async def _watch(self, job: InstanceJob) -> None:
        await self._handles[job.name].wait()
        log.error("%s has ended", job.name)
        self._ready.discard(job.name)
        self._loads.pop(job.name, None)
        if not self._started.done():
            # Its reason may still be on its way.
            await asyncio.wait({self._started}, timeout=_LAST_WORDS_S)
        self._refuse_start(f"{job.name} ended before it was ready; its log says why")
        self._act(self._core.lost(job.name, job.incarnation, time.monotonic_ns()))

    def _refuse_start(self, message: str) -> None:
        if not self._started.done():
            self._started.set_exception(ConfigError(message))


def _log_summary(summary: Summary) -> None:
    request_log.info("request ended", extra={"fields": msgspec.structs.asdict(summary)})


def endpoint(directory: Path) -> str:
    """Where the router listens for its instances: a socket file that only this user can open."""
    return f"ipc://{directory}/router"
