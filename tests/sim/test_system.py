"""The simulated system against queueing theory, hand computation and its own limits."""

from __future__ import annotations

from statistics import fmean

import msgspec
import pytest

from staffel.config import SLO, ConfigError
from staffel.latency.model import Work
from staffel.latency.profile import Slowdown
from staffel.sim.models import IDEAL, Arrival, HostCpu, LinkModel, Shell
from staffel.sim.system import simulate
from tests.sim.cases import SECOND, Constant, Linear, at_once, model, poisson

PAIR = [model("prefill"), model("decode")]
SLOW_LINK = LinkModel(bytes_per_second=1e6, fixed_s=0.0, kv_bytes_per_token=1000)


@pytest.mark.parametrize(("load", "requests"), [(0.3, 8_000), (0.6, 12_000), (0.8, 40_000)])
def test_mean_ttft_is_that_of_m_d_1(load: float, requests: int) -> None:
    """Mean wait in M/D/1 plus service (Pollaczek and Khinchine): D + R D² / (2 (1 - R D))."""
    service, prompt = 0.05, 512
    rate = load / service
    instances = [model("prefill", Constant(service), chunk_tokens=prompt), model("decode")]
    outcome = simulate(instances, None, poisson(rate, requests, prompt, 1), shell=IDEAL)
    expected = service + rate * service**2 / (2 * (1 - rate * service))
    assert fmean(record.ttft for record in outcome.records) == pytest.approx(expected, rel=0.02)


def test_one_request_takes_the_time_of_its_steps() -> None:
    """Prompt of 100 tokens, pull of 100 ms within the first decode step, 3 steps of a token."""
    outcome = simulate(PAIR, SLOW_LINK, at_once(1, 100, 4), shell=IDEAL)
    (record,) = outcome.records
    prefill, pull, decode = 1e-3 + 100 * 1e-4, 112 * 1e-3, 2e-3  # 7 blocks of 16 tokens
    assert record.ttft == pytest.approx(prefill)
    assert record.e2e == pytest.approx(prefill + pull + 3 * decode)
    assert record.tpot == pytest.approx((pull + 3 * decode) / 3)
    assert outcome.handoffs() == [pytest.approx(pull)]


def test_messages_and_loops_take_their_time() -> None:
    ideal = simulate(PAIR, None, at_once(1, 100, 4), shell=IDEAL).records[0]
    shell = Shell(message_s=0.01, step_s=0.1, request_s=1.0)
    record = simulate(PAIR, None, at_once(1, 100, 4), shell=shell).records[0]
    # An order and a report before the first token; after it an order and, at the end, a report.
    assert record.ttft - ideal.ttft == pytest.approx(1.0 + 2 * 0.01 + 0.1)
    # The read's step and three of a token.
    assert record.e2e - record.ttft - (ideal.e2e - ideal.ttft) == pytest.approx(2 * 0.01 + 4 * 0.1)


def test_others_take_cpu_time_only_from_hosts_without_an_idle_instance() -> None:
    """Two alike side by side: of each step of either, each of them gives half the time."""
    pair = [model("colocated"), model("colocated")]
    alone, together = (
        [
            simulate(pair, None, at_once(requests, 100, 40), shell=shell).records[0].tpot
            for shell in (IDEAL, Shell(message_s=0.0, cpu=HostCpu(0.0, 0.008, 0.002)))
        ]
        for requests in (1, 2)
    )
    assert alone[1] == alone[0]
    assert together[1] - together[0] == pytest.approx(0.01, rel=0.05)


def test_a_read_beside_the_step_costs_those_who_decode_nothing() -> None:
    """The second prompt's 7 blocks are read while the first request decodes."""
    arrivals = [Arrival(0, 100, 300), Arrival(SECOND // 10, 100, 2)]
    within, beside = (
        simulate(PAIR, LinkModel(1e7, 0.0, 1000, beside=beside), arrivals).records[0].e2e
        for beside in (False, True)
    )
    assert within - beside == pytest.approx(112 * 1000 / 1e7)


def test_the_same_arguments_give_the_same_bits() -> None:
    runs = [simulate(PAIR, SLOW_LINK, poisson(30, 300, 80, 20, seed=3)) for _ in range(2)]
    first, second = (msgspec.json.encode((run.records, run.summaries)) for run in runs)
    assert first == second
    assert runs[0].instances == runs[1].instances


def test_full_prefill_memory_makes_prompts_wait_for_the_pull() -> None:
    """Memory for one prompt: the second is computed when the first has been read."""
    prefill = model("prefill", kv_tokens=112)
    outcome = simulate([prefill, model("decode")], SLOW_LINK, at_once(2, 100, 4), shell=IDEAL)
    first, second = outcome.records
    read_ns = outcome.summaries[0].handoff_ns
    assert read_ns is not None
    assert second.ttft == pytest.approx(2 * first.ttft + read_ns / 1e9)


def test_decode_memory_that_runs_out_preempts_and_all_still_end() -> None:
    decode = model("decode", kv_tokens=20 * 16)
    outcome = simulate([model("prefill"), decode], None, at_once(8, 30, 100))
    assert outcome.instances[1].preemptions > 0
    assert sum(summary.repeats for summary in outcome.summaries) > 0
    assert [record.tokens for record in outcome.records] == [100] * 8
    assert all(record.error is None for record in outcome.records)


def test_a_request_that_fits_nowhere_fails() -> None:
    outcome = simulate(PAIR, None, [Arrival(0, 2_000_000, 5), Arrival(0, 10, 5)])
    assert outcome.records[0].status == 503
    assert outcome.records[0].missed(SLO(ttft=100)) == ["failed"]
    assert outcome.records[1].error is None


def test_a_closed_loop_keeps_its_number_in_flight() -> None:
    outcome = simulate([model("colocated")], None, at_once(50, 10, 5), concurrency=3)
    ends = sorted(record.ended for record in outcome.records)
    assert [record.scheduled for record in outcome.records] == [0.0] * 3 + ends[:-3]


def test_token_times_are_kept_where_asked_for() -> None:
    plain, timed = (
        simulate(PAIR, None, poisson(20, 50, 100, 30), token_times=times).records
        for times in (False, True)
    )
    for one, other in zip(plain, timed, strict=True):
        assert len(other.chunks) == 30
        assert len(one.chunks) == 2
        assert (one.ttft, one.e2e) == (other.ttft, other.e2e)
        assert one.tpot == pytest.approx(other.tpot)
        assert other.itl_p99 >= other.tpot


def test_prompts_that_begin_alike_hit_the_prefix_cache() -> None:
    alike = [Arrival(i * SECOND, 160, 2, prefix=(7, 8), block=64) for i in range(3)]
    outcome = simulate([model("colocated")], None, alike)
    assert [summary.cached_tokens for summary in outcome.summaries] == [0, 128, 128]
    other = [Arrival(i * SECOND, 160, 2, prefix=(7, 9 + i), block=64) for i in range(3)]
    outcome = simulate([model("colocated")], None, other)
    assert [summary.cached_tokens for summary in outcome.summaries] == [0, 64, 64]
    without = simulate([model("colocated", prefix_cache=False)], None, alike)
    assert [summary.cached_tokens for summary in without.summaries] == [0, 0, 0]


@pytest.mark.parametrize("stages", [2, 4])
def test_a_pipeline_serves_as_many_more_at_the_same_pace(stages: int) -> None:
    """Steps of fixed length: stages times the throughput, and the same time per token."""
    runs = [
        simulate(
            [model("colocated", Constant(0.1, 0.1), pp=pp, chunk_tokens=10)],
            None,
            at_once(900, 10, 5),
            shell=IDEAL,
        )
        for pp in (1, stages)
    ]
    assert runs[0].seconds / runs[1].seconds == pytest.approx(stages, rel=0.1)


def test_a_short_batch_waits_behind_a_long_one_in_a_pipeline() -> None:
    """Parts of 5.5 and 1 ms: the second enters at 5.5, and waits for the last stage until 11."""
    arrivals = [Arrival(0, 100, 1), Arrival(1000, 10, 1)]
    outcome = simulate([model("colocated", pp=2)], None, arrivals, shell=IDEAL)
    assert [record.ended for record in outcome.records] == pytest.approx([0.011, 0.012])


def test_a_lone_request_goes_no_faster_through_a_pipeline() -> None:
    lone = [
        simulate(
            [model("colocated", Constant(0.1, 0.1), pp=pp)], None, at_once(1, 10, 5), shell=IDEAL
        )
        .records[0]
        .e2e
        for pp in (1, 4)
    ]
    assert lone == pytest.approx([0.5, 0.5])


def test_busy_neighbours_slow_a_step_down() -> None:
    slowdown = {
        "prefill": {"prefill": Slowdown(fixed_s=0.0055, share=0.5)},
        "decode": {"prefill": Slowdown(share=0.5)},
    }
    instances = [model("colocated", slowdown=slowdown) for _ in range(2)]
    alone, beside = (
        simulate(instances, None, at_once(requests, 100, 1), shell=IDEAL) for requests in (1, 2)
    )
    assert alone.records[0].ttft == pytest.approx(0.011)
    assert [r.ttft for r in beside.records] == pytest.approx([0.011, 0.022])


def test_utilisation_and_samples_say_what_went_on() -> None:
    outcome = simulate(PAIR, None, poisson(40, 400, 100, 30))
    prefill, decode = outcome.instances
    assert prefill.prompt_tokens == 400 * 100
    assert decode.decode_tokens == 400 * 29
    assert 0 < outcome.utilisation(prefill) < outcome.utilisation(decode) <= 1
    assert max(sample.used for sample in decode.samples) > 0
    assert decode.samples[-1].at <= outcome.seconds


@pytest.mark.parametrize("roles", [["prefill"], ["decode"], []])
def test_what_is_no_placement_is_refused(roles: list[str]) -> None:
    with pytest.raises(ConfigError, match="placement: needs prefill and decode"):
        simulate([model(role) for role in roles], None, at_once(1, 10, 2))


def test_a_cache_smaller_than_a_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_tokens: 3"):
        simulate([model("colocated", kv_tokens=3)], None, at_once(1, 10, 2))


def test_work_is_what_the_batches_computed() -> None:
    """Two chunks of a prompt of 150, then 3 decode steps that see 151, 152 and 153 keys."""
    seen: list[Work] = []

    class Spy(Linear):
        def step_seconds(self, work: Work) -> float:
            seen.append(work)
            return super().step_seconds(work)

    simulate([model("colocated", Spy(), chunk_tokens=100)], None, at_once(1, 150, 4))
    assert seen == [
        Work.prefill(100),
        Work.prefill(50, cached=100),
        *(Work.decode(1, keys) for keys in (151, 152, 153)),
    ]
