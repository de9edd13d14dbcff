"""Two hundred mixed requests, sixteen at a time, with little memory, and the journal of it all."""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.conftest import MakeServer
from tests.e2e.server import MODEL, Server, run_cli, until

pytestmark = pytest.mark.e2e

REQUESTS = 200
AT_A_TIME = 16
QUESTION = "What is the capital of France?"
BEGINNINGS = [
    f"{beginning} {subject}"
    for beginning in ("The history of", "How to make", "A short poem about")
    for subject in ("bread", "silver", "the moon", "rivers")
]
TIGHT = ("--max-model-len", "512", "--kv-memory", "24MiB")
"""About 500 tokens an instance: sequences wait for room, and are preempted for want of it."""


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("journal") / "journal"


@pytest.fixture(scope="module")
def server(make_server: MakeServer, journal: Path) -> Iterator[Server]:
    with make_server(*TIGHT, "--record", str(journal)) as server:
        yield server


def mixed_body(draw: random.Random) -> dict[str, Any]:
    """A completion request of any kind."""
    words = ["red", "green", "blue", "seven", "house", "river", "walked", "slowly"]
    length = draw.choice([1, 3, 8, 10, 15, 16, 16, 17, 30, 40] * 3 + [300])
    body: dict[str, Any] = {
        "model": MODEL,
        "prompt": " ".join(draw.choices(words, k=length)),
        "max_tokens": draw.choice([1, 2, 4, 8, 16, 40]),
        "temperature": draw.choice([0, 0.7, 1.0]),
        "n": draw.choice([1, 1, 1, 1, 2]),
        "seed": draw.getrandbits(32),
        "stream": draw.random() < 0.5,
    }
    extras: list[dict[str, Any]] = [
        {},
        {"stop": [" the", "\n"]},
        {"top_p": 0.9, "presence_penalty": 0.5},
        {"logprobs": 2},
        {"extra_body": {"ignore_eos": True, "min_tokens": 1}},
        {"extra_body": {"top_k": 20, "repetition_penalty": 1.1}},
    ]
    return body | draw.choice(extras)


async def one_request(client: openai.AsyncOpenAI, number: int) -> str:
    """How it went, in a word."""
    draw = random.Random(number)
    kind = number % 10
    if kind == 0:
        return await _ask_for_paris(client)
    if kind in (1, 2):
        return await _leave(client, mixed_body(draw), draw.uniform(0, 1.5))
    return await _complete(client, mixed_body(draw))


async def _ask_for_paris(client: openai.AsyncOpenAI) -> str:
    answer = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": QUESTION}],
        temperature=0,
        max_tokens=10,
    )
    assert answer.choices[0].message.content == "The capital of France is Paris."
    return "right"


async def _leave(client: openai.AsyncOpenAI, body: dict[str, Any], after: float) -> str:
    working = asyncio.create_task(_complete(client, body | {"max_tokens": 100}))
    await asyncio.wait({working}, timeout=after)
    working.cancel()
    return "left" if (await asyncio.gather(working, return_exceptions=True))[0] else "done"


async def _complete(client: openai.AsyncOpenAI, body: dict[str, Any]) -> str:
    answer = await client.completions.create(**body)
    if body["stream"]:
        finishes = [c.finish_reason async for chunk in answer for c in chunk.choices]
    else:
        finishes = [choice.finish_reason for choice in answer.choices]
        assert answer.usage.completion_tokens <= body["max_tokens"] * body["n"]
    assert sum(finish in ("stop", "length") for finish in finishes) == body["n"]
    return "done"


async def soak(url: str) -> Counter[str]:
    gate = asyncio.Semaphore(AT_A_TIME)

    async def gated(number: int) -> str:
        async with gate:
            return await one_request(client, number)

    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120
    ) as client:
        return Counter(await asyncio.gather(*map(gated, range(REQUESTS))))


def test_soak(server: Server) -> None:
    outcomes = asyncio.run(soak(server.url))
    assert outcomes["right"] == REQUESTS // 10
    assert outcomes.total() == REQUESTS
    until(lambda: server.quiet, 3, f"everything is free: {server.instances()}")
    assert "Paris" in server.greedy(QUESTION)
    assert server.quiet
    assert server.errors() == []


def test_memory_runs_short(server: Server, disaggregated: Server) -> None:
    """More text than there are blocks for: sequences are preempted, and go on as if nothing was."""
    with ThreadPoolExecutor(len(BEGINNINGS)) as pool:
        told = list(pool.map(lambda beginning: tell(server, beginning), BEGINNINGS))
        undisturbed = list(pool.map(lambda beginning: tell(disaggregated, beginning), BEGINNINGS))
    assert told == undisturbed
    assert server.instances()["decode-0"].preemptions > 0
    assert disaggregated.instances()["decode-0"].preemptions == 0
    assert any(line["repeats"] for line in server.summaries())
    until(lambda: server.quiet, 3, "everything is free")


def tell(server: Server, beginning: str) -> str:
    answer = server.client.completions.create(
        model=MODEL,
        prompt=beginning,
        temperature=0,
        max_tokens=60,
        extra_body={"ignore_eos": True},
    )
    return answer.choices[0].text


def test_the_journal_replays_to_the_same_commands(server: Server, journal: Path) -> None:
    server.signal(signal.SIGTERM)
    assert server.wait_ended(10) == 0
    replayed = run_cli("replay", str(journal))
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert replayed.stdout.startswith("4 cores")
    assert "every command is the same" in replayed.stdout


def test_another_journal_does_not_replay(journal: Path, tmp_path: Path) -> None:
    """One token of one step changed: what followed was decided on another one."""
    lines = journal.read_bytes().splitlines(keepends=True)
    place = next(n for n, line in enumerate(lines) if b'"commit"' in line and b"prefill-0" in line)
    del lines[place]
    changed = tmp_path / "changed"
    changed.write_bytes(b"".join(lines))
    replayed = run_cli("replay", str(changed))
    assert replayed.returncode == 1
    assert "returned something else" in replayed.stdout
