"""From the start to the end of a server, by whichever signal."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from tests.e2e.conftest import SMALL, MakeServer
from tests.e2e.server import MODEL, Server, until

pytestmark = pytest.mark.e2e

END_S = 5
"""How long Ctrl-C may take."""
BROKEN = (openai.APIError, httpx.TransportError)
"""What the client raises for a stream that doesn't come to its end."""


def say_much(server: Server, started: threading.Event, tokens: int = 400) -> str | None:
    """A stream; returns its finish reason."""
    chunks = server.client.completions.create(
        model=MODEL,
        prompt="Once upon a time",
        max_tokens=tokens,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    finish = None
    for chunk in chunks:
        started.set()
        finish = chunk.choices[0].finish_reason or finish
    return finish


def test_start_and_drain(make_server: MakeServer) -> None:
    """The server as most people run it, without any option but the port."""
    server = make_server().launch()
    try:
        check_starting(server)
        server.wait_ready()
        until(lambda: "curl" in server.out, 1, "the banner is there")
        check_banner(server)
        check_drains(server)
    finally:
        server.close()


def check_starting(server: Server) -> None:
    until(lambda: server.status("/health") == 200, 20, "/health says 200")
    assert server.status("/ready") == 503
    refused = server.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
    assert refused.status_code == 503
    assert "starting" in refused.json()["error"]["message"]
    while "curl" not in server.out:
        if server.status("/ready") == 200:
            return
        time.sleep(0.02)
    assert server.status("/ready") == 200, "the banner came before the workers"


def check_banner(server: Server) -> None:
    for expected in (server.url, MODEL, "1P1D", "prefill-0", "decode-0", "/v1/chat/completions"):
        assert expected in server.out


def check_drains(server: Server) -> None:
    """SIGTERM: a running stream finishes, nobody new gets in."""
    started = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(say_much, server, started, 60)
        assert started.wait(10)
        server.signal(signal.SIGTERM)
        until(lambda: server.status("/ready") == 503, 2, "/ready says 503")
        with pytest.raises(openai.InternalServerError) as refused:
            server.greedy("Hello?")
        assert refused.value.status_code == 503
        assert "Retry-After" in refused.value.response.headers
        assert running.result(20) == "length"
    assert server.wait_ended(END_S) == 0
    assert server.errors() == []


def test_ctrl_c_while_streaming(make_server: MakeServer) -> None:
    with make_server(*SMALL) as server, ThreadPoolExecutor(4) as pool:
        events = [threading.Event() for _ in range(4)]
        running = [pool.submit(say_much, server, event) for event in events]
        assert all(event.wait(20) for event in events)
        server.signal(signal.SIGINT)
        server.wait_ended(END_S)
        for stream in running:
            with pytest.raises(BROKEN):
                stream.result(5)
        assert "Traceback" not in server.log


MOMENTS: dict[str, Callable[[Server], object]] = {
    "at once": lambda server: True,
    "while it imports": lambda server: time.sleep(0.5) or True,
    "when instances load": lambda server: len(server.processes()) == 2,
    "when instances are nearly there": lambda server: "is ready" in server.log,
}


@pytest.mark.parametrize("moment", MOMENTS.values(), ids=MOMENTS.keys())
def test_ctrl_c_while_starting(make_server: MakeServer, moment: Callable[[Server], object]) -> None:
    server = make_server(*SMALL).launch()
    try:
        until(lambda: moment(server), 30, "the moment has come")
        server.signal(signal.SIGINT)
        server.wait_ended(END_S)
        # Before Python itself is up, its own words are all that there can be.
        too_early = server.log.startswith("Fatal Python error: init_")
        assert too_early or "Traceback" not in server.log
    finally:
        server.close()


def test_kill_9(make_server: MakeServer) -> None:
    """Instances notice that their server is gone, and go too, though they were at work."""
    with make_server(*SMALL) as server, ThreadPoolExecutor(1) as pool:
        started = threading.Event()
        running = pool.submit(say_much, server, started)
        assert started.wait(20)
        assert len(server.processes()) == 2
        server.process.kill()
        server.wait_ended(END_S)
        with pytest.raises(BROKEN):
            running.result(5)
