"""Live measurements over real sockets, against a server whose times are known."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from staffel.bench.arrivals import Arrivals
from staffel.bench.interfere import interference
from staffel.bench.measure import Measurement, Subject, Watch
from staffel.bench.preflight import discover
from staffel.bench.prompts import PromptMaker
from staffel.bench.results import Probe
from staffel.bench.summary import summarise
from staffel.bench.unloaded import relative_slo, start_rate, unloaded
from staffel.bench.workloads import parse_workload
from staffel.config import SLO, ConfigError
from tests.bench.fake_reply import Behaviour
from tests.bench.fake_server import FakeServer
from tests.bench.virtual import Server

NOBODY = type("Nobody", (), {"show": lambda *_: None, "tell": lambda *_: None})()


async def subject(server: FakeServer, workload: str = "fixed:10,3", **more) -> Subject:
    return Subject(
        await discover(server.url),
        parse_workload(workload),
        lambda seed: PromptMaker(None, seed=seed),
        Arrivals("poisson"),
        seed=1,
        **more,
    )


def measurement(of: Subject, slo: str, target: float = 0.9) -> Measurement:
    return Measurement(of, SLO.parse(slo), target, NOBODY, asyncio.Event())


async def test_ten_requests_a_second_of_throughput_three_of_goodput() -> None:
    """The article's example: all are answered, three of ten in time."""
    count = iter(range(10**6))

    def behave(_: dict) -> Behaviour:
        return Behaviour(tpot=0.005 if next(count) % 10 < 3 else 0.06)

    async with FakeServer(behave) as server:
        slo = SLO(ttft=1.0, tpot=0.03)
        of = await subject(server)
        of.arrivals = Arrivals("constant")
        measured = Measurement(of, slo, 0.9, NOBODY, asyncio.Event())
        probe = await measured.probe(10.0, seconds=None, requests=60)
    summary = summarise(probe, slo)
    assert summary.throughput == pytest.approx(10, rel=0.03)
    assert summary.good == pytest.approx(3, rel=0.1)
    assert summary.missed == {"tpot": pytest.approx(0.7 * summary.requests, abs=4)}


async def test_search_finds_the_goodput_of_a_queue() -> None:
    """Over real sockets; the exact search is tested in virtual time."""
    exact = Server(service=0.02, tpot=0.005, tokens=3).goodput(SLO(ttft=0.08), 0.9)
    async with FakeServer(Behaviour(prefill=0.02)) as server:
        measured = measurement(await subject(server), "ttft=0.08")
        found, notes = await measured.search(exact / 2, 20, 0.05)
    assert found is not None, notes
    assert found.value == pytest.approx(exact, rel=0.25)
    assert found.low <= exact * 1.1
    assert found.high >= exact * 0.9
    assert all(probe.generator.kept_up for probe in measured.probes)


async def test_a_probe_far_too_fast_is_called_early() -> None:
    async with FakeServer(Behaviour(prefill=0.05)) as server:
        measured = measurement(await subject(server), "ttft=0.1")
        probe = await asyncio.wait_for(
            measured.probe(60.0, seconds=30, requests=None, early=True), 20
        )
    assert probe.verdict == "below"
    assert any(record.ended is None for record in probe.records)


async def test_stopping_keeps_what_there_is() -> None:
    async with FakeServer(Behaviour()) as server:
        measured = measurement(await subject(server), "ttft=1")
        asyncio.get_running_loop().call_later(1.5, measured.stop.set)
        probe = await asyncio.wait_for(measured.probe(20, seconds=60, requests=None), 10)
    assert 5 < len(probe.records) < 200


async def test_every_plan_has_prompts_of_its_own() -> None:
    """A prefix cache must not know the second probe's prompts from the first."""
    async with FakeServer(Behaviour()) as server:
        of = await subject(server, "fixed:40,2")
        plans = [of.plan(10, None, 20) for _ in range(2)]
    prompts = [ask.prompt for plan in plans for _, ask in plan]
    assert len(set(prompts)) == 40


async def test_a_plan_needs_an_end() -> None:
    async with FakeServer(Behaviour()) as server:
        of = await subject(server)
        with pytest.raises(ConfigError, match="--duration or --requests"):
            of.plan(10, None, None)


async def test_unloaded_times_give_an_slo_and_a_first_rate() -> None:
    async with FakeServer(Behaviour(prefill=0.05, tpot=0.01)) as server:
        records = await unloaded(await subject(server, "fixed:10,11"))
    slo = relative_slo("ttft=4x,tpot=2x", records)
    assert slo.ttft == pytest.approx(0.2, rel=0.15)
    assert slo.tpot == pytest.approx(0.02, rel=0.15)
    assert start_rate(records, 900) == pytest.approx(1 / 0.15, rel=0.15)
    assert start_rate(records, 45) == 10


@pytest.mark.parametrize("text", ["ttft=5", "speed=5x", "ttft=x", "", "tpot=5x"])
async def test_wrong_relative_slos_are_refused(text: str) -> None:
    async with FakeServer(Behaviour()) as server:
        records = await unloaded(await subject(server, "fixed:10,1"))
    with pytest.raises(ConfigError, match="--slo"):
        relative_slo(text, records)


async def test_open_requests_are_those_that_were_due_and_have_not_ended() -> None:
    async with FakeServer(Behaviour()) as server:
        of = await subject(server)
        plan = of.plan(1000, None, 50)
    watch = Watch(1000, SLO(ttft=1), plan)
    watch.began -= plan[29][0]
    assert 30 <= len(watch.open_requests()) <= 50


async def test_interference_shows_what_a_prompt_does_to_streams(monkeypatch) -> None:
    """Here prompts wait for nobody and streams for no prompt: no interference at all."""
    monkeypatch.setattr("staffel.bench.interfere.SETTLE_S", 0.5)
    async with FakeServer(Behaviour(prefill_token=0.001, tpot=0.02)) as server:
        of = await subject(server)
        rows, probe = await interference(of, streams=2, lengths=[50, 100], repeats=1)
    assert [row.prompt_tokens for row in rows] == [50, 100]
    for row in rows:
        assert row.itl_alone == pytest.approx(0.02, rel=0.2)
        assert row.itl_during == pytest.approx(0.02, rel=0.2)
    assert rows[1].ttft > rows[0].ttft
    assert isinstance(probe, Probe)


async def test_interference_beyond_the_context_is_refused() -> None:
    async with FakeServer(Behaviour(tpot=0.001)) as server:
        server.models = [{"id": "fake", "max_model_len": 300}]
        of = await subject(server)
        with pytest.raises(ConfigError, match="context is 300"):
            await interference(of, streams=1, lengths=[50], repeats=9)


def test_results_survive_a_file(tmp_path: Path) -> None:
    from staffel.bench.results import Result
    from tests.bench.examples import result

    for name in ("r.json", "r.json.gz"):
        result("1P1D").save(tmp_path / name)
        assert Result.load(tmp_path / name) == result("1P1D")
    assert (tmp_path / "r.json.gz").stat().st_size < (tmp_path / "r.json").stat().st_size / 3
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ConfigError, match="not a result"):
        Result.load(tmp_path / "bad.json")
    with pytest.raises(ConfigError, match="No such file"):
        Result.load(tmp_path / "none.json")
