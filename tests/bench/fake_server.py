"""A fast fake of an OpenAI server with exactly known times, and every fault on demand.

Prefill is a queue with one server and a service time that is known before (M/D/1 under Poisson
arrivals); each token after the first comes `tpot` later. All are planned on an absolute schedule,
so that one late wake-up moves nothing else. Times are perf_counter's, which every process of a
Linux machine shares.

    python -m tests.bench.fake_server --prefill 0.05 --tpot 0.02

prints its port, and serves until its standard input closes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import ssl
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from time import perf_counter
from typing import Any

import httptools

from tests.bench.fake_reply import Behaviour, Reply, Writer


@dataclass
class Served:
    """What was done for one request."""

    prompt: Any
    body: dict[str, Any]
    arrived: float
    due: list[float] = field(default_factory=list)
    """When each chunk was to be written."""
    written: list[float] = field(default_factory=list)
    """When it was."""
    closed: float | None = None
    """When the connection ended."""


Script = Callable[[dict[str, Any]], Behaviour]


class FakeServer:
    """Use as an async context manager; `url` is where it listens."""

    def __init__(self, behaviour: Behaviour | Script | None = None, **fields: Any) -> None:
        given = behaviour if behaviour is not None else Behaviour()
        self._script: Script = given if callable(given) else lambda _: replace(given, **fields)
        self.log: list[Served] = []
        self.open_connections = 0
        self.most_connections = 0
        self.free_at = 0.0
        self.url = ""
        self.models: list[dict[str, Any]] = [{"id": "fake", "max_model_len": 4096}]
        self.api_key: str | None = None

    async def __aenter__(self) -> FakeServer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self, tls: ssl.SSLContext | None = None) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _Connection(self), "127.0.0.1", 0, ssl=tls, backlog=2048
        )
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{port}"

    async def stop(self) -> None:
        self._server.close()

    def behave(self, body: dict[str, Any]) -> Behaviour:
        return self._script(body)

    def first_at(self, arrived: float, service: float) -> float:
        """When the prefill queue is done with a request that takes `service` seconds of it."""
        self.free_at = max(self.free_at, arrived) + service
        return self.free_at


class _Connection(asyncio.Protocol):
    def __init__(self, server: FakeServer) -> None:
        self._server = server
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._key = ""
        self._body = b""
        self._served: Served | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._server.open_connections += 1
        self._server.most_connections = max(
            self._server.most_connections, self._server.open_connections
        )

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.open_connections -= 1
        if self._served:
            self._served.closed = perf_counter()
        if self._timer:
            self._timer.cancel()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"authorization":
            self._key = value.decode().removeprefix("Bearer ")

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        server = self._server
        if server.api_key is not None and self._key != server.api_key:
            self._answer(401, {"error": {"message": "wrong key"}})
        elif self._url == b"/v1/models":
            self._answer(200, {"object": "list", "data": server.models})
        elif self._url == b"/log":
            self._answer(200, [asdict(served) for served in server.log])
        elif self._url in (b"/v1/completions", b"/v1/chat/completions"):
            self._generate(json.loads(self._body))
        else:
            self._answer(404, {"detail": "Not Found"})

    def _generate(self, body: dict[str, Any]) -> None:
        arrived = perf_counter()
        behaviour = self._server.behave(body)
        prompt = body.get("prompt") or body["messages"][0]["content"]
        self._served = Served(prompt=prompt, body=body, arrived=arrived)
        self._server.log.append(self._served)
        for name in behaviour.refuses:
            if name in body or name in body.get("stream_options", {}):
                self._answer(400, {"error": {"message": f"unknown field {name!r}"}})
                return
        if behaviour.status != 200:
            self._answer(behaviour.status, {"error": {"message": behaviour.message}})
        elif behaviour.json_answer:
            self._answer(200, {"choices": [{"text": "whole", "finish_reason": "stop"}]})
        else:
            self._stream(behaviour, body)

    def _stream(self, behaviour: Behaviour, body: dict[str, Any]) -> None:
        served = self._served
        service = behaviour.prefill + behaviour.prefill_token * len(served.prompt)
        first = self._server.first_at(served.arrived, service)
        self._writer = Writer(self._transport, behaviour)
        self._reply = Reply(behaviour, body, "chat" in self._url.decode())
        self._writer.head()
        for event in self._reply.opening():
            self._writer.event(event)
        self._behaviour, self._index = behaviour, 0
        served.due = [first + at * behaviour.tpot for at in self._reply.offsets()]
        if behaviour.burst:
            served.due = served.due[-1:] * len(served.due)
        self._wait()

    def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        served = self._served
        if self._index == len(served.due):
            self._finish()
        elif self._index == self._behaviour.stall_at:
            return
        elif (due := served.due[self._index]) <= perf_counter():
            self._write()
        else:
            # The loop's clock is perf_counter's on Linux.
            self._timer = loop.call_at(due, self._write)

    def _write(self) -> None:
        index, behaviour = self._index, self._behaviour
        if index == behaviour.error_at:
            self._writer.event(json.dumps({"error": {"message": "it broke", "code": 500}}))
            self._writer.end()
        elif index == behaviour.cut_at:
            self._transport.close()
        elif index == behaviour.reset_at:
            self._transport.abort()
        else:
            self._writer.event(self._reply.chunk(index))
            self._served.written.append(perf_counter())
            self._index += 1
            self._wait()

    def _finish(self) -> None:
        for event in self._reply.closing():
            self._writer.event(event)
        self._writer.end()

    def _answer(self, status: int, content: Any) -> None:
        body = json.dumps(content).encode()
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        self._transport.write(head.encode() + body)
        self._transport.close()


@contextlib.asynccontextmanager
async def separate_server(**fields: float | int) -> Any:
    """A fake server in a process of its own; gives its URL."""
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in fields.items()]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.bench.fake_server",
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        line = await process.stdout.readline()
        yield f"http://127.0.0.1:{int(line)}"
    finally:
        process.stdin.close()
        await process.wait()


async def _main(behaviour: Behaviour) -> None:
    async with FakeServer(behaviour) as server:
        print(server.url.rpartition(":")[2], flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name, kind in {
        "prefill": float,
        "prefill-token": float,
        "tpot": float,
        "chunk-tokens": int,
        "padding": int,
    }.items():
        parser.add_argument(
            f"--{name}", type=kind, default=getattr(Behaviour, name.replace("-", "_"))
        )
    asyncio.run(_main(Behaviour(**vars(parser.parse_args()))))
