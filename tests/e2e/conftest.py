"""Servers that tests share. Those that a test ends are started by the test's own module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.answers import QUESTIONS
from tests.e2e.server import Server

SMALL = ("--max-model-len", "1024", "--kv-memory", "256MiB", "--threads", "1")
"""One thread: two that share busy cores with other programs wait for each other for ages."""

MakeServer = Callable[..., Server]


@pytest.fixture(scope="session")
def make_server(tmp_path_factory: pytest.TempPathFactory, real_model: Path) -> Iterator[MakeServer]:
    """Makes servers that aren't started yet; the model is there, whoever asks first."""
    made: list[Server] = []

    def make(*args: str, **how: Any) -> Server:
        made.append(Server(tmp_path_factory.mktemp("server"), *args, **how))
        return made[-1]

    yield make
    for server in made:
        assert not server.left(), f"processes are left: {server.left()}"


@pytest.fixture(scope="session")
def disaggregated(make_server: MakeServer) -> Iterator[Server]:
    """1P1D."""
    with make_server(*SMALL) as server:
        yield server


@pytest.fixture(scope="session")
def colocated(make_server: MakeServer) -> Iterator[Server]:
    """One instance that does both, with chunked prefill."""
    with make_server("--colocated", "1", *SMALL) as server:
        yield server


@pytest.fixture(params=["disaggregated", "colocated"])
def either(request: pytest.FixtureRequest) -> Server:
    """The test runs on both."""
    server: Server = request.getfixturevalue(request.param)
    return server


@pytest.fixture(scope="session")
def expected(disaggregated: Server) -> dict[str, str]:
    """Each question's likeliest answer, asked alone."""
    return {question: disaggregated.greedy(question) for question in QUESTIONS}
