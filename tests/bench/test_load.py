"""The open loop: what is sent when, how a run ends, and when it says that it failed itself."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Iterator
from itertools import count, pairwise
from statistics import median
from typing import Any

import pytest

from staffel.bench.arrivals import Arrivals, arrival_times
from staffel.bench.client import Planned
from staffel.bench.endpoint import Address, Endpoint, Features
from staffel.bench.load import judge, processes_for, run_load
from staffel.bench.records import Record
from staffel.bench.results import Generator
from staffel.bench.sender import Counts, Effort
from staffel.bench.workload import Ask
from staffel.config import ConfigError
from tests.bench.fake_server import FakeServer

HERE = 0
"""This process sends."""


def endpoint(server: FakeServer, **fields: Any) -> Endpoint:
    features = Features(ignore_eos=True, include_usage=True, continuous_usage=True)
    given = {"features": features, "timeout": 20.0, "model": "fake", **fields}
    return Endpoint(address=Address.parse(server.url), **given)


def every(gap: float, tokens: int = 4) -> Iterator[tuple[float, Ask]]:
    """Endless, with each request's place as its prompt."""
    return ((index * gap, Ask(f"{index}", tokens, 1)) for index in count())


async def run(
    server: FakeServer, plan: Any, *, processes: int = HERE, **options: Any
) -> tuple[list[Record], Generator]:
    records: list[Record] = []
    given = {"on_record": records.append, **options}
    generator = await run_load(endpoint(server), plan, processes=processes, **given)
    return sorted(records, key=lambda record: record.index), generator


@pytest.mark.parametrize("processes", [0, 1, 2])
async def test_every_request_is_sent_when_the_plan_says(processes: int) -> None:
    times = arrival_times(Arrivals("poisson"), 100, seed=3)
    plan = [(next(times), Ask(f"{index}", 4, 1)) for index in range(50)]
    async with FakeServer() as server:
        records, generator = await run(server, plan, processes=processes)
        prompts = {served.prompt for served in server.log}
    assert [record.index for record in records] == list(range(50))
    # Records are rounded to microseconds.
    assert [record.scheduled for record in records] == [round(at, 6) for at, _ in plan]
    assert prompts == {f"{index}" for index in range(50)}
    assert min(record.lateness for record in records) >= 0
    assert median(record.lateness for record in records) < 0.02
    assert all(record.error is None for record in records)
    assert generator.processes == max(processes, 1)
    assert 0 < generator.cpu_share < 4


async def test_processes_share_one_clock() -> None:
    """Arrivals 10 ms apart at the server, whichever of two processes sent them."""
    async with FakeServer() as server:
        await run(server, every(0.01), processes=2, requests=30)
        arrived = [served.arrived for served in server.log]
    gaps = [later - earlier for earlier, later in pairwise(arrived)]
    assert median(gaps) == pytest.approx(0.01, abs=0.003)


async def test_fault_timers_that_start_after_a_concurrency_limit() -> None:
    """A prefill of 20 ms for arrivals every 5 ms: the queue is the server's, and TTFT has it."""
    async with FakeServer(prefill=0.02, tpot=0.001) as server:
        records, _ = await run(server, every(0.005), requests=60)
        assert server.most_connections > 40
    # Request k waits for the k before it: 20 ms · (k + 1) after the start, less its arrival.
    expected = [0.02 * (k + 1) - 0.005 * k for k in range(60)]
    errors = [record.ttft - ttft for record, ttft in zip(records, expected, strict=True)]
    assert min(errors) > -0.001
    assert median(errors) < 0.02


async def test_fault_achieved_rate_below_the_asked_one() -> None:
    """A server that answers nothing for a second gets its requests all the same."""
    async with FakeServer(prefill=1.0) as server:
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(1.0, stop.set)
        records, _ = await run(server, every(0.005), requests=100, stop=stop)
        assert len(server.log) == 100
    assert len(records) == 100
    assert records[-1].sent - records[0].sent == pytest.approx(0.495, abs=0.05)


async def test_fault_failures_left_out_of_the_denominator() -> None:
    async with FakeServer(status=429) as server:
        records, generator = await run(server, every(0.002), requests=20)
    assert len(records) == 20
    assert all("429" in record.error for record in records)
    assert generator.trouble is None or "behind" in generator.trouble


async def test_a_duration_cuts_the_schedule_and_the_rest_is_waited_for() -> None:
    async with FakeServer(tpot=0.05) as server:
        records, _ = await run(server, every(0.01), duration=0.1)
    assert [record.scheduled for record in records] == [index * 0.01 for index in range(10)]
    assert all(record.ended > 0.15 and record.error is None for record in records)


@pytest.mark.parametrize("processes", [0, 2])
async def test_stopping_closes_what_is_in_flight_and_keeps_what_it_had(processes: int) -> None:
    stop = asyncio.Event()
    async with FakeServer(tpot=0.02) as server:
        asyncio.get_running_loop().call_later(1.5, stop.set)
        started = time.perf_counter()
        records, _ = await run(server, every(0.05, tokens=10_000), stop=stop, processes=processes)
        await asyncio.sleep(0.05)
        assert server.open_connections == 0
    assert time.perf_counter() - started < 5
    assert len(records) > 5
    assert all(record.ended is None and record.error is None for record in records)
    assert len(records[0].chunks) > 10
    assert sum(chunk.tokens for chunk in records[0].chunks) == len(records[0].chunks)


@pytest.mark.parametrize("processes", [0, 1])
async def test_a_callback_that_returns_true_stops_the_run(processes: int) -> None:
    records: list[Record] = []

    def enough(record: Record) -> bool:
        records.append(record)
        return len(records) >= 10

    async with FakeServer(tpot=0.001) as server:
        await run(server, every(0.01), on_record=enough, processes=processes)
    assert 10 <= len(records) < 60


@pytest.mark.parametrize("processes", [0, 1])
async def test_an_error_in_a_callback_ends_the_run(processes: int) -> None:
    def broken(record: Record) -> None:
        raise KeyError("mine")

    async with FakeServer(tpot=0.001) as server:
        with pytest.raises(KeyError, match="mine"):
            await run(server, every(0.01), on_record=broken, processes=processes)


async def test_progress_adds_up() -> None:
    seen: list[Counts] = []
    async with FakeServer(tpot=0.05) as server:
        await run(server, every(0.02), requests=30, on_progress=seen.append, processes=2)
    assert seen[-1].sent > 0
    assert all(one.sent == one.in_flight + one.done + one.failed for one in seen)


async def test_a_plan_without_requests_is_refused() -> None:
    async with FakeServer() as server:
        with pytest.raises(ConfigError, match="--duration"):
            await run(server, every(1.0), duration=0.0)


async def test_a_prompt_that_the_api_cannot_take_is_refused_before_the_start() -> None:
    async with FakeServer() as server:
        target = endpoint(server, api="chat")
        with pytest.raises(ConfigError, match="--api"):
            await run_load(target, [(0.0, Ask([1], 2, 1))], on_record=lambda _: None)


async def test_a_run_that_wants_for_files_fails_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("staffel.bench.sender.raise_file_limit", lambda: None)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with FakeServer(tpot=0.2) as server:
        resource.setrlimit(resource.RLIMIT_NOFILE, (60, hard))
        try:
            _, generator = await run(server, every(0.001), requests=100)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not generator.kept_up
    assert "ulimit" in generator.trouble


async def test_a_generator_that_could_not_keep_up_fails() -> None:
    """A callback that holds the event loop makes sending late."""
    async with FakeServer(tpot=0.001) as server:
        _, generator = await run(
            server, every(0.005), requests=40, on_record=lambda _: time.sleep(0.02)
        )
    assert not generator.kept_up
    assert generator.lateness_p99 > 0.01
    assert "behind" in generator.trouble


async def test_a_busy_event_loop_delays_sending_by_no_more_than_itself() -> None:
    """Preparing keeps pace with the schedule, though each turn of the loop takes 20 ms."""

    async def hog() -> None:
        while True:
            time.sleep(0.02)
            await asyncio.sleep(0)

    async with FakeServer() as server:
        hogging = asyncio.create_task(hog())
        records, _ = await run(server, every(0.0025, tokens=1), requests=400)
        hogging.cancel()
    # A request prepared per turn would make the last of the 400 seven seconds late.
    assert max(record.lateness for record in records) < 3


def effort(*, late: float = 0.0, lag: float = 0.0, faults: tuple[str, ...] = ()) -> Effort:
    return Effort(lateness=[late] * 100, lags=[lag] * 100, cpu=1.0, faults=list(faults))


@pytest.mark.parametrize(
    ("late", "lag", "ttft", "kept_up"),
    [
        (0.004, 0.004, 0.010, True),
        (0.006, 0.000, 0.010, False),
        (0.000, 0.006, 0.010, False),
        (0.006, 0.006, 1.000, True),
        (0.060, 0.000, 1.000, False),
    ],
)
def test_the_rule_of_keeping_up(late: float, lag: float, ttft: float, kept_up: bool) -> None:
    generator = judge([effort(late=late, lag=lag)], [ttft] * 10, 0.5, 1)
    assert generator.kept_up is kept_up
    assert (generator.trouble is None) is kept_up


def test_keeping_up_counts_all_processes_and_needs_no_replies() -> None:
    assert judge([effort(late=0.001), effort(late=0.009)], [], 0.5, 2).kept_up is False
    assert judge([effort(late=0.001), effort(late=0.004)], [], 0.5, 2).kept_up is True


@pytest.mark.parametrize(("rate", "tokens", "needed"), [(1, 100, 1), (200, 10, 1), (1000, 500, 2)])
def test_processes_follow_from_the_chunks_to_read(
    rate: float, tokens: int, needed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    plan = [Planned(index, index / rate, Ask("", tokens, 1)) for index in range(200)]
    assert processes_for(plan) == needed
