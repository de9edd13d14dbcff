"""`staffel serve`: the HTTP server, the service behind it, and how both start and end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from msgspec import Struct

from staffel.api.app import create_app
from staffel.api.connections import Connections, GuardedProtocol, Listener
from staffel.api.grammars import Grammars
from staffel.api.limits import Limits
from staffel.api.serving import ApiOptions
from staffel.api.tokens import Tokenizer
from staffel.config import ConfigError, ModelSpec, Placement
from staffel.control.messages import LEASE_NS, RouterConfig, window_tokens
from staffel.runtime.deployment import make_jobs
from staffel.runtime.folder import ServerFolder
from staffel.runtime.instance import InstanceJob
from staffel.runtime.journal_file import check_writable
from staffel.runtime.launcher import Launcher, ProcessLauncher
from staffel.runtime.logs import dropped_lines
from staffel.runtime.service import Service, endpoint

log = logging.getLogger("staffel.server")

_LONGEST_S = 10**6
_CLOSE_S = 1
"""How long connections may take to send their last bytes at the end."""


class ServeOptions(Struct, frozen=True, kw_only=True):
    """What `staffel serve` was asked for. Times in seconds."""

    placement: Placement
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    served_model_name: str | None = None
    record: Path | None = None
    max_queue: int = 1024
    local_prefill_below: int = 0
    request_timeout: float = 0
    drain_timeout: float = 30
    hang_timeout: float = 120
    seed: int | None = None
    limits: Limits = Limits()
    log_level: str = "INFO"

    def __post_init__(self) -> None:
        for name in ("request_timeout", "drain_timeout", "hang_timeout"):
            if not 0 <= getattr(self, name) <= _LONGEST_S:
                raise ConfigError(f"--{name.replace('_', '-')}: must be 0 to {_LONGEST_S} seconds")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.strip()):
            raise ConfigError("--api-key: must be ASCII text; HTTP headers carry nothing else")
        if self.local_prefill_below and not self.placement.count("prefill"):
            raise ConfigError(
                "--local-prefill-below: is for prefill and decode instances; leave it out"
            )


def serve(model: ModelSpec, options: ServeOptions, announce: Callable[[str], None]) -> None:
    """Serve until a signal ends it. `announce` gets the lines for the user.

    SIGINT ends at once; SIGTERM lets running requests finish first.

    Raises:
        ConfigError: something in the options can't be had.
    """
    asyncio.run(_serve(model, options, announce))


async def _serve(
    model: ModelSpec,
    options: ServeOptions,
    announce: Callable[[str], None],
) -> None:
    connections = Connections(options.limits)
    grammars = Grammars(model, options.limits)
    with _listen(options.host, options.port, connections) as listener:
        tokenizer = await asyncio.to_thread(Tokenizer.load, model.path)
        service, jobs = make_service(model, options, ProcessLauncher())
        api_options = ApiOptions(
            api_key=options.api_key,
            served_model_name=options.served_model_name,
            seed=options.seed,
            limits=options.limits,
        )
        app = create_app(
            service,
            model,
            tokenizer,
            grammars,
            api_options,
            dropped_lines=dropped_lines,
            crowded=lambda: connections.crowded,
        )
        server = _http_server(app, connections)
        http = asyncio.create_task(server.serve(sockets=[listener]))
        ending = _Ending(service, options.drain_timeout)

        def ready() -> None:
            announce(_banner(model, options, jobs))
            grammars.warm_up()

        try:
            await _run(service, http, ending, ready)
        finally:
            grammars.close()
            await service.stop()
            server.should_exit = True
            await http


def make_service(
    model: ModelSpec, options: ServeOptions, launcher: Launcher
) -> tuple[Service, list[InstanceJob]]:
    """A service that isn't started yet, and the jobs of its instances."""
    if options.record is not None:
        check_writable(options.record)
    folder = ServerFolder()
    try:
        return _service_in(folder, model, options, launcher)
    except BaseException:
        folder.close()
        raise


def _service_in(
    folder: ServerFolder, model: ModelSpec, options: ServeOptions, launcher: Launcher
) -> tuple[Service, list[InstanceJob]]:
    jobs = make_jobs(
        options.placement,
        model,
        endpoint=endpoint(folder.path),
        hang_timeout=options.hang_timeout,
        journal=options.record,
        log_level=options.log_level,
    )
    config = RouterConfig(
        block_size=options.placement.instances[0].block_size,
        lease_ns=LEASE_NS,
        local_prefill_below=options.local_prefill_below,
        window_tokens=window_tokens(max(s.chunk_tokens for s in options.placement.instances)),
        max_queue=options.max_queue,
        request_timeout_ns=int(options.request_timeout * 1e9),
    )
    service = Service(
        jobs,
        launcher,
        config,
        folder=folder,
        hang_timeout=options.hang_timeout,
        journal=options.record,
    )
    return service, jobs


def _listen(host: str, port: int, connections: Connections) -> Listener:
    """Take the port before anything slow happens."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(f"--host: {host!r} can't be resolved: {error.strerror}") from None
    listener = Listener(family, kind, protocol)
    listener.connections = connections
    listener.keep_spare()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"--port: {port} on {host} can't be taken ({error.strerror}); choose another one"
        ) from None
    listener.listen(2048)
    return listener


class _HttpServer(uvicorn.Server):
    """uvicorn, but signals are handled here: they concern more than the HTTP side."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _http_server(app: FastAPI, connections: Connections) -> _HttpServer:
    config = uvicorn.Config(
        app,
        http=partial(GuardedProtocol, connections=connections),  # type: ignore[arg-type]
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=_CLOSE_S,
    )
    return _HttpServer(config)


class _Ending:
    """SIGINT: `stop` is set. SIGTERM: the service drains first, for a while."""

    def __init__(self, service: Service, drain_timeout: float) -> None:
        self.stop = asyncio.Event()
        self._service = service
        self._drain_timeout = drain_timeout
        self._draining: asyncio.Task[None] | None = None
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self.stop.set)
        loop.add_signal_handler(signal.SIGTERM, self._begin_drain)

    def _begin_drain(self) -> None:
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        log.info("draining: no new requests, running ones may finish")
        self._service.drain()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._service.drained(), self._drain_timeout)
        self.stop.set()


async def _run(
    service: Service, http: asyncio.Task[None], ending: _Ending, ready: Callable[[], None]
) -> None:
    """From the start of the instances to the signal that ends everything."""
    started = asyncio.create_task(service.start())
    stopped = asyncio.create_task(ending.stop.wait())
    failed = asyncio.create_task(service.failed())
    try:
        await asyncio.wait({started, stopped, failed}, return_when=asyncio.FIRST_COMPLETED)
        if started.done():
            started.result()
            ready()
            await asyncio.wait({stopped, failed, http}, return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            failed.result()
    finally:
        for task in (started, stopped, failed):
            task.cancel()
        await asyncio.gather(started, stopped, failed, return_exceptions=True)


def _banner(model: ModelSpec, options: ServeOptions, jobs: list[InstanceJob]) -> str:
    """Address, placement, and a line to copy."""
    host = "127.0.0.1" if options.host in ("0.0.0.0", "::") else options.host
    url = f"http://{f'[{host}]' if ':' in host else host}:{options.port}"
    name = options.served_model_name or model.name
    instances = "\n".join(f"  {_describe(job)}" for job in jobs)
    body = (
        f'{{"model": "{name}", "temperature": 0, "messages": '
        '[{"role": "user", "content": "What is the capital of France?"}]}'
    )
    key = ' -H "Authorization: Bearer $API_KEY"' if options.api_key else ""
    return (
        f"\nStaffel serves {name} on {url} as {options.placement.short()}\n{instances}\n\n"
        f"Try:\n  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\\n"
        f"    -d '{body}'\n"
    )


def _describe(job: InstanceJob) -> str:
    where = f"cores {','.join(map(str, job.cores))}" if job.cores else f"{job.threads} threads"
    kv_bytes = job.spec.kv_bytes
    kv = "what its GPU has left" if kv_bytes is None else f"{kv_bytes / 2**20:g} MiB"
    return f"{job.name}: {where}, KV {kv}"
