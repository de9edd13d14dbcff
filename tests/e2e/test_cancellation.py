"""A client that leaves: whatever stage it is, both sides are free within a step and 200 ms."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import msgspec
import pytest

from tests.e2e.conftest import SMALL, MakeServer
from tests.e2e.server import Server, until

pytestmark = pytest.mark.e2e

DELAYS_MS = range(0, 401, 10)
CHUNK = 256
NOTICE_S = 0.2


@pytest.fixture(scope="module")
def server(make_server: MakeServer) -> Iterator[Server]:
    """One whose log holds nothing but this."""
    with make_server(*SMALL) as server:
        yield server


@pytest.fixture(scope="module")
def step(server: Server) -> float:
    """Seconds that the longest step takes here: a whole chunk of a prompt, measured twice."""
    return max(_time_chunk(server, first) for first in (40_000, 41_000))


def _time_chunk(server: Server, first: int) -> float:
    began = time.monotonic()
    body = {"prompt": _prompt(first, CHUNK), "max_tokens": 1}
    assert server.http.post("/v1/completions", json=body).status_code == 200
    return time.monotonic() - began


def _prompt(first: int, length: int) -> list[int]:
    """Ids that no cache knows, for each `first`."""
    return [first, *range(500, 500 + length - 1)]


class Visitor:
    """A client on a bare socket, which can leave when it likes."""

    def __init__(self, server: Server, prompt: list[int], *, stream: bool) -> None:
        body = msgspec.json.encode(
            {
                "prompt": prompt,
                "stream": stream,
                "max_tokens": 200,
                "ignore_eos": True,
                "temperature": 0,
            }
        )
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        self._socket = socket.create_connection(("127.0.0.1", server.port), timeout=30)
        self._socket.sendall(head.encode() + body)
        self.sent_at = time.monotonic()

    def leave(self, after: float = 0) -> None:
        """Close the connection `after` seconds from the sending."""
        time.sleep(max(0, self.sent_at + after - time.monotonic()))
        self._socket.close()

    def await_tokens(self, count: int) -> None:
        """Until that many events have come."""
        seen = b""
        while seen.count(b"data: ") < count:
            received = self._socket.recv(4096)
            assert received, seen
            seen += received


def check_freed(server: Server, requests: int, step: float) -> None:
    """All `requests` are over, and nothing of them is left, in time."""
    until(
        lambda: server.requests_over() >= requests and server.quiet,
        step + NOTICE_S,
        f"everything is free: {server.instances()}",
    )


@pytest.mark.parametrize("length", [8, 48, 600], ids=lambda n: f"prompt{n}")
def test_leaving_at_any_time(server: Server, step: float, length: int) -> None:
    """A streamed and a whole request side by side; a long prompt takes several chunks."""
    delays = DELAYS_MS if length < CHUNK else DELAYS_MS[::4]
    for delay in delays:
        over = server.requests_over()
        visitors = [
            Visitor(server, _prompt(1000 + delay + stream + 2 * length, length), stream=stream)
            for stream in (False, True)
        ]
        for visitor in visitors:
            visitor.leave(delay / 1000)
        check_freed(server, over + len(visitors), step)
    assert "Paris" in server.greedy("What is the capital of France?")


def test_leaving_during_the_handoff(server: Server, step: float) -> None:
    """The first token announces the handoff, which waits for the steps of a running stream."""
    companion = Visitor(server, _prompt(900, 4), stream=True)
    companion.await_tokens(3)
    over = server.requests_over()
    for number in range(8):
        visitor = Visitor(server, _prompt(20_000 + number, 200), stream=True)
        visitor.await_tokens(1)
        time.sleep(number * 0.01)
        visitor.leave()
        companion.await_tokens(1)
    companion.leave()
    check_freed(server, over + 9, step)
    assert "Paris" in server.greedy("What is the capital of France?")


def test_every_stage_was_hit(server: Server) -> None:
    """The log of the tests above: how far each request came that was cancelled."""
    cancelled = [line for line in server.summaries() if line["outcome"] == "cancelled"]
    stages = {
        "prefill": [c for c in cancelled if c["output_tokens"] == 0],
        "handoff": [c for c in cancelled if c["output_tokens"] == 1 and c["handoff_ns"] is None],
        "decode": [c for c in cancelled if c["handoff_ns"] is not None],
    }
    counts = {stage: len(lines) for stage, lines in stages.items()}
    assert min(counts.values()) >= 3, counts
    assert server.errors() == []
    assert server.quiet
