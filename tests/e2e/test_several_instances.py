"""2P1D and 1P2D: the same answers, and what happens when instances are killed, or hang.

What another instance can go on with goes on; the rest ends with a 503. Lost ones come back.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event

import openai
import pytest

from tests.e2e.answers import check_answers
from tests.e2e.conftest import SMALL, MakeServer
from tests.e2e.server import MODEL, Server, until

pytestmark = pytest.mark.e2e

LONG = 40


@pytest.fixture(scope="module")
def two_prefill(make_server: MakeServer) -> Iterator[Server]:
    with make_server("--prefill", "2", "--decode", "1", *SMALL) as server:
        yield server


@pytest.fixture(scope="module")
def two_decode(make_server: MakeServer) -> Iterator[Server]:
    with make_server("--prefill", "1", "--decode", "2", "--hang-timeout", "4", *SMALL) as server:
        yield server


def stream(server: Server, prompt: str, at: Callable[[int], None]) -> list[int]:
    """Greedy token ids of a completion; `at` hears how many have come."""
    ids: list[int] = []
    chunks = server.client.completions.create(
        model=MODEL,
        prompt=prompt,
        temperature=0,
        max_tokens=LONG,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    for chunk in chunks:
        ids += chunk.choices[0].model_extra["token_ids"]  # type: ignore[index]
        at(len(ids))
    return ids


class Running:
    """Streams in threads, which can be waited for until each has got some tokens."""

    def __init__(self, server: Server, prompts: list[str], tokens: int) -> None:
        self._pool = ThreadPoolExecutor(len(prompts))
        self._server, self._tokens = server, tokens
        self._far = [Event() for _ in prompts]
        self.streams: list[Future[list[int]]] = [
            self._pool.submit(self._run, prompt, far)
            for prompt, far in zip(prompts, self._far, strict=True)
        ]

    def _run(self, prompt: str, far: Event) -> list[int]:
        def at(count: int) -> None:
            if count >= self._tokens:
                far.set()

        return stream(self._server, prompt, at)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def wait(self) -> None:
        """Until each has got `tokens` tokens."""
        assert all(far.wait(30) for far in self._far)

    def results(self) -> list[list[int]]:
        return [running.result(60) for running in self.streams]


TALES = ["Once upon a time", "The first law of motion says", "A recipe for apple pie:", "In 1969,"]
MANY = [f"Chapter {n}. " + "The sea was calm and the wind was low. " * 25 for n in range(6)]


@pytest.fixture(scope="module")
def tales(disaggregated: Server) -> list[list[int]]:
    """What nothing disturbed."""
    with Running(disaggregated, TALES, LONG) as running:
        return running.results()


def check_refuses(server: Server) -> None:
    """A phase is gone: alive, not ready, and new requests hear so at once."""
    until(lambda: server.status("/ready") == 503, 2, "/ready says 503")
    assert server.status("/health") == 200
    for stream in (False, True):
        body = {"prompt": "x", "max_tokens": 1, "stream": stream}
        refused = server.http.post("/v1/completions", json=body)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == 503
        assert int(refused.headers["Retry-After"]) >= 1


def test_same_answers_with_two_prefill(two_prefill: Server, expected: dict[str, str]) -> None:
    check_answers(two_prefill, expected)


def test_same_answers_with_two_decode(two_decode: Server, expected: dict[str, str]) -> None:
    check_answers(two_decode, expected)


def test_a_prefill_instance_dies_during_prefill(two_prefill: Server) -> None:
    """Its prompts go to the other one."""
    with Running(two_prefill, MANY, 1) as running:
        until(lambda: two_prefill.instances()["prefill-0"].running, 20, "prefill-0 has work")
        two_prefill.kill_instance("prefill-0")
        assert [len(ids) for ids in running.results()] == [LONG] * len(MANY)
    assert two_prefill.status("/ready") == 200
    assert any(line["losses"] for line in two_prefill.summaries())


def test_all_prefill_instances_die_and_come_back(
    two_prefill: Server, tales: list[list[int]], expected: dict[str, str]
) -> None:
    """What decodes goes on to its end, and new requests are taken as soon as one is back."""
    names = ("prefill-0", "prefill-1")
    for name in names:
        two_prefill.wait_back(name)
    before = two_prefill.instances()["prefill-1"].restarts
    with Running(two_prefill, TALES, 8) as running:
        running.wait()
        for name in names:
            two_prefill.kill_instance(name)
        check_refuses(two_prefill)
        assert running.results() == tales
    until(lambda: two_prefill.quiet, 2, "the decode instance is free")
    for name in names:
        two_prefill.wait_back(name)
    assert two_prefill.instances()["prefill-1"].restarts == before + 1
    assert two_prefill.status("/ready") == 200
    check_answers(two_prefill, expected)


def test_a_decode_instance_dies(two_decode: Server, tales: list[list[int]]) -> None:
    """No token twice, none missing."""
    with Running(two_decode, TALES, 8) as running:
        running.wait()
        two_decode.kill_instance("decode-0")
        assert running.results() == tales
    assert any(line["losses"] == 1 for line in two_decode.summaries())
    assert two_decode.status("/ready") == 200
    assert "decode-0" in two_decode.http.get("/ready").json()["missing"]
    until(lambda: two_decode.quiet, 2, "everything is free")
    two_decode.wait_back("decode-0")
    assert two_decode.http.get("/ready").json()["missing"] == {}


@pytest.mark.parametrize("name", ["decode-0", "prefill-0"])
def test_an_instance_hangs(two_decode: Server, tales: list[list[int]], name: str) -> None:
    """It is stopped and stays so: it is killed after a while, and others go on with its work."""
    for each in two_decode.instances():
        two_decode.wait_back(each)
    with Running(two_decode, TALES, 8) as running:
        running.wait()
        two_decode.kill_instance(name, signal.SIGSTOP)
        if name == "prefill-0":
            late = two_decode.client.with_options(timeout=15).completions
            with pytest.raises(openai.InternalServerError) as refused:
                late.create(model=MODEL, prompt="Two roads", max_tokens=2)
            assert refused.value.status_code == 503
        assert running.results() == tales
    two_decode.wait_back(name)
    assert two_decode.instances()[name].restarts
    assert "--hang-timeout" in two_decode.log
    assert two_decode.greedy("What is the capital of France?")
    until(lambda: two_decode.quiet, 2, "everything is free")


def test_all_decode_instances_die(two_decode: Server, expected: dict[str, str]) -> None:
    """Streams get a 503 as an event, others as their answer; nobody hangs, and all comes back."""
    names = ("decode-0", "decode-1")
    for name in names:
        two_decode.wait_back(name)
    with ThreadPoolExecutor(1) as pool, Running(two_decode, TALES[:2], 4) as running:
        whole = pool.submit(two_decode.greedy, "Tell me a long story.", 200)
        running.wait()
        for name in names:
            two_decode.kill_instance(name)
        for broken in running.streams:
            with pytest.raises(openai.APIError) as event:
                broken.result(10)
            assert str(event.value.code) == "503"
        with pytest.raises(openai.InternalServerError) as answer:
            whole.result(10)
        assert answer.value.status_code == 503
    check_refuses(two_decode)
    until(lambda: two_decode.quiet, 2, "the prefill instance is free")
    for name in names:
        two_decode.wait_back(name)
    check_answers(two_decode, expected)


def test_ctrl_c_ends_a_server_with_a_hung_instance(two_decode: Server) -> None:
    """The last test on this server."""
    two_decode.kill_instance("decode-1", signal.SIGSTOP)
    two_decode.signal(signal.SIGINT)
    two_decode.wait_ended(8)
