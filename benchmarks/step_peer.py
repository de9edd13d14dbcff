"""The same cells end to end, at a server of ours and at another: who answers sooner?

A prompt's cell is the time from sending it to its one token (TTFT). A decode cell is the median
time between tokens (ITL) while all of its sequences run: from when the last one has its first
token, until each has had so many more; then the client leaves. Prompts are token ids; those of
prompt cells are new each time, so that no prefix cache helps, and those of decode cells stay, so
that one may bring the sequences together sooner. The servers take turns, cell by cell: while one
computes, the other has nothing to do.

Ours is one colocated instance with `--threads` cores to itself, the first ones; the client has what
is left. It takes a prompt in one step, as the peer should be told to where it doesn't by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count, pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from step_limits import Cell

from staffel.bench.client import Client, Planned
from staffel.bench.endpoint import Endpoint
from staffel.bench.preflight import discover
from staffel.bench.records import Chunk, Record
from staffel.bench.workload import Ask
from staffel.config import ModelSpec

STEADY = 32
"""Tokens of each sequence that count in a decode cell."""
PROMPTS = 3
"""Prompts of a prefill cell in a turn."""
MODEL_LEN = 2048
_KV_MEMORY = "2GiB"
_START_SECONDS = 180
_LOOK_EVERY = 0.02
_PAUSE = 0.5
"""Seconds for a server to notice that its clients have left."""


def compare(options: argparse.Namespace, cells: Sequence[Cell], turns: int) -> dict[str, Any]:
    """Start our server, and measure it and `options.peer`."""
    vocabulary = ModelSpec.load(options.path, name="model").vocab_size
    with serving(options) as url:
        return asyncio.run(_compare(url, options.peer, cells, turns, vocabulary))


@contextmanager
def serving(options: argparse.Namespace) -> Iterator[str]:
    """The URL of a server of ours that is ready, and gone afterwards."""
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(_command(options, port), stdout=subprocess.DEVNULL)
    try:
        _wait_ready(server, url)
        yield url
    finally:
        server.terminate()
        server.wait()


def _command(options: argparse.Namespace, port: int) -> list[str]:
    quantization = ["--quantization", options.quantization] if options.quantization else []
    return [
        *(sys.executable, "-m", "staffel", "serve", str(options.path), "--port", str(port)),
        *("--colocated", "1", "--threads", str(options.threads), *quantization),
        *("--max-model-len", str(MODEL_LEN), "--chunk-tokens", str(MODEL_LEN)),
        *("--kv-memory", _KV_MEMORY, "--log-level", "warning"),
    ]


def _free_port() -> int:
    """One that nobody listens on: an answer is from our server then."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _wait_ready(server: subprocess.Popen[bytes], url: str) -> None:
    for _ in range(_START_SECONDS):
        if server.poll() is not None:
            sys.exit(f"our server ended with status {server.returncode}")
        try:
            with urllib.request.urlopen(f"{url}/ready"):
                return
        except OSError:
            time.sleep(1)
    sys.exit(f"our server was not ready within {_START_SECONDS} s")


async def _compare(
    ours: str, peer: str, cells: Sequence[Cell], turns: int, vocabulary: int
) -> dict[str, Any]:
    servers = {"ours": await _server(ours), "peer": await _server(peer)}
    source = np.random.default_rng(1)
    seen: dict[Cell, dict[str, list[float]]] = {c: {s: [] for s in servers} for c in cells}
    for cell in cells:
        kept = _prompts(source, vocabulary, cell)
        for turn in range(1 + turns):
            for name, client in _alternating(servers, turn):
                prompts = kept if cell.decodes else _prompts(source, vocabulary, cell)
                seconds = await _measure(client, cell, prompts)
                seen[cell][name] += seconds if turn else []  # the first turn is for warming up
    return {
        # Some servers name a model by its folder; its place says nothing.
        "model": Path(servers["peer"].endpoint.model).name,
        "turns": turns,
        "cells": [_figures(cell, **seen[cell]) for cell in cells],
    }


def _alternating(servers: dict[str, Any], turn: int) -> Iterator[tuple[str, Any]]:
    """Neither is always the first."""
    names = list(servers.items())
    return iter(names if turn % 2 else names[::-1])


def _figures(cell: Cell, ours: list[float], peer: list[float]) -> dict[str, Any]:
    return {
        "cell": str(cell),
        "ours_ms": 1e3 * median(ours),
        "peer_ms": 1e3 * median(peer),
        "ratio": median(peer) / median(ours),
    }


def _prompts(source: np.random.Generator, vocabulary: int, cell: Cell) -> list[list[int]]:
    """Random token ids, without those at the low end, where the special ones often are."""
    size = (cell.sequences, cell.context) if cell.decodes else (PROMPTS, cell.tokens)
    return source.integers(vocabulary // 100, vocabulary, size).tolist()


class _Server:
    """An endpoint, and the requests to it."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._client = Client(endpoint)
        self._numbers = count()

    async def first_token(self, prompt: list[int]) -> float:
        """Seconds from sending the prompt to its one token."""
        record = await self._ask(prompt, 1)[1]
        _check(record)
        return record.chunks[0].at - record.sent

    async def together(self, prompts: list[list[int]]) -> list[Record]:
        """Stream them all until each has had STEADY tokens beside all others, then leave."""
        asked = [self._ask(prompt, MODEL_LEN - len(prompt) - 1) for prompt in prompts]
        tasks = [task for _, task in asked]
        while not self._steady([number for number, _ in asked]):
            if any(task.done() for task in tasks):
                break  # refused or broken: the records say why
            await asyncio.sleep(_LOOK_EVERY)
        for task in tasks:
            task.cancel()
        records = await asyncio.gather(*tasks)
        await asyncio.sleep(_PAUSE)
        return records

    def _ask(self, prompt: list[int], tokens: int) -> tuple[int, asyncio.Task[Record]]:
        number = next(self._numbers)
        planned = Planned(number, perf_counter(), Ask(prompt, tokens, len(prompt)))
        request = self._client.encode(planned)
        return number, asyncio.create_task(self._client.perform(planned, request))

    def _steady(self, numbers: list[int]) -> bool:
        streams = [self._client.open.get(number) for number in numbers]
        if not all(stream and stream.pieces for stream in streams):
            return False
        start = max(stream.pieces[0].at for stream in streams)
        return all(sum(piece.at > start for piece in stream.pieces) > STEADY for stream in streams)


async def _server(url: str) -> _Server:
    return _Server(await discover(url, extra={"temperature": 0}))


async def _measure(server: _Server, cell: Cell, prompts: list[list[int]]) -> list[float]:
    if cell.decodes:
        return list(_gaps(await server.together(prompts)))
    return [await server.first_token(prompt) for prompt in prompts]


def _gaps(records: list[Record]) -> Iterator[float]:
    """Seconds between the tokens of all while all of them run."""
    for record in records:
        _check(record)
    start = max(record.chunks[0].at for record in records)
    for record in records:
        for before, chunk in pairwise(record.chunks):
            if before.at >= start:
                yield _gap(before, chunk)


def _gap(before: Chunk, chunk: Chunk) -> float:
    """Of one token: a chunk may bring several."""
    return (chunk.at - before.at) / max(1, chunk.tokens)


def _check(record: Record) -> None:
    if record.error is not None or not record.chunks:
        sys.exit(f"a request failed: {record.error or 'no token came'}")
