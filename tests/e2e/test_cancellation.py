"""A client that leaves: whatever stage it is, both sides are free within a step and 200 ms."""

from __future__ import annotations

import socket
import time

import msgspec
import pytest

from tests.e2e.server import Server, until

pytestmark = pytest.mark.e2e

DELAYS_MS = range(0, 401, 10)
CHUNK = 256
NOTICE_S = 0.2


@pytest.fixture(scope="module")
def earlier(disaggregated: Server) -> int:
    """Requests of other tests."""
    return len(disaggregated.summaries())


@pytest.fixture
def server(disaggregated: Server, earlier: int) -> Server:
    return disaggregated


@pytest.fixture(scope="module")
def step(disaggregated: Server) -> float:
    """Seconds that the longest step takes here: a whole chunk of a prompt, measured twice."""
    return max(_time_chunk(disaggregated, first) for first in (40_000, 41_000))


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


def leave_together(server: Server, after: float, bodies: list[tuple[list[int], bool]]) -> None:
    visitors = [Visitor(server, prompt, stream=stream) for prompt, stream in bodies]
    for visitor in visitors:
        visitor.leave(after)


def test_leaving_at_any_time(server: Server, step: float) -> None:
    """Two requests side by side, one streamed; by turns the shorter and the longer one."""
    for number, delay in enumerate(DELAYS_MS):
        over = server.requests_over()
        short, long = _prompt(1000 + number, 8), _prompt(2000 + number, 48)
        streams_short = number % 2 == 0
        leave_together(server, delay / 1000, [(short, streams_short), (long, not streams_short)])
        check_freed(server, over + 2, step)
    assert "Paris" in server.greedy("What is the capital of France?")


def test_leaving_between_chunks(server: Server, step: float) -> None:
    """A prompt of several chunks is given up after the one that runs."""
    for number, delay in enumerate(DELAYS_MS[::5]):
        over = server.requests_over()
        leave_together(server, delay / 1000, [(_prompt(3000 + number, 900), number % 2 == 0)])
        check_freed(server, over + 1, step)
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


def test_every_stage_was_hit(server: Server, earlier: int) -> None:
    """The log of the tests above: how far each request came that was cancelled."""
    cancelled = [line for line in server.summaries()[earlier:] if line["outcome"] == "cancelled"]
    stages = {
        "prefill": [c for c in cancelled if c["output_tokens"] == 0],
        "handoff": [c for c in cancelled if c["output_tokens"] == 1 and c["handoff_ns"] is None],
        "decode": [c for c in cancelled if c["handoff_ns"] is not None],
    }
    counts = {stage: len(lines) for stage, lines in stages.items()}
    assert min(counts.values()) >= 3, counts
    assert server.errors() == []
    assert server.quiet
