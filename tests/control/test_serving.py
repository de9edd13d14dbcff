"""Requests come out right and everything is freed, at depth 1 and 2 of batches in flight."""

from __future__ import annotations

import random

import pytest

from staffel.control.messages import Decoded, Event, Start, Tokens
from staffel.control.request import Request, SamplingParams
from tests.control.world import (
    BLOCK,
    World,
    disaggregated,
    expected_output,
    next_token,
    request,
)

PROMPT_LENGTHS = [1, BLOCK - 1, BLOCK, BLOCK + 1, 16, 17, 33, 40]


@pytest.fixture(params=[1, 2], ids=["depth1", "depth2"])
def depth(request) -> int:
    return request.param


def prompts(seed: int = 0, lengths: list[int] = PROMPT_LENGTHS) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1, 50) for _ in range(length)] for length in lengths]


def mixed(max_tokens: int = 12) -> list[Request]:
    return [request(f"r{i}", prompt, max_tokens) for i, prompt in enumerate(prompts())]


def colocated(depth: int, policy: str, **settings) -> World:
    world = World(depth=depth)
    world.add("colocated-0", "colocated", policy=policy, **settings)
    return world


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_disaggregated_serves_all_lengths(depth: int, prefill: int, decode: int) -> None:
    world = disaggregated(prefill, decode, depth=depth)
    asked = mixed()
    for one in asked:
        world.submit(one)
    world.run()
    world.assert_served(*asked)
    world.assert_at_rest()


@pytest.mark.parametrize("policy", ["chunked", "prefill-first"])
def test_colocated_serves_all_lengths(depth: int, policy: str) -> None:
    world = colocated(depth, policy)
    asked = mixed()
    for one in asked:
        world.submit(one)
    world.run()
    world.assert_served(*asked)
    world.assert_at_rest()


def test_first_token_reaches_the_client_before_the_handoff() -> None:
    world = disaggregated()
    asked = request("a", [7] * 9, stop_ids=())
    world.submit(asked)
    world.step(world.workers["prefill-0"])
    assert world.outputs["a"] == expected_output(asked)[:1]
    world.run()
    world.assert_served(asked)


def test_a_request_that_ends_on_its_first_token_is_not_handed_over(depth: int) -> None:
    world = disaggregated(depth=depth)
    prompt = [3, 1, 4, 1, 5]
    first = next_token(prompt)
    asked = [
        request("length", prompt, max_tokens=1),
        request("stop", prompt, max_tokens=5, stop_ids=(first,)),
    ]
    for one in asked:
        world.submit(one)
    world.run()
    world.assert_served(*asked)
    assert world.finishes == {"length": "length" if first else "stop", "stop": "stop"}
    assert world.workers["decode-0"].core.report() is None
    world.assert_at_rest()


def test_scoring_a_prompt_draws_nothing(depth: int) -> None:
    world = disaggregated(depth=depth)
    world.submit(request("score", [5] * 30, max_tokens=0))
    world.run()
    assert world.outputs["score"] == []
    assert world.finishes["score"] == "length"
    world.assert_at_rest()


def test_two_prompts_that_do_not_fit_together_are_served_one_after_the_other(depth: int) -> None:
    world = disaggregated(depth=depth)
    small = disaggregated(depth=depth, blocks=12)
    asked = [request(name, prompts(1, [40])[0][i:], 6) for i, name in enumerate("ab")]
    for one in asked:
        world.submit(one)
        small.submit(one)
    small.step(small.workers["prefill-0"])
    assert small.workers["prefill-0"].core._load().waiting == 1
    small.run()
    small.assert_served(*asked)
    small.assert_at_rest()


def test_pull_waits_on_the_prefill_side_for_decode_blocks(depth: int) -> None:
    """A full decode instance is no failure: the pin holds the KV until there is room."""
    world = World(depth=depth)
    world.add("prefill-0", "prefill", blocks=64)
    world.add("decode-0", "decode", blocks=12)
    asked = [
        request(f"r{i}", prompt, 4, stop_ids=()) for i, prompt in enumerate(prompts(2, [30] * 5))
    ]
    for one in asked:
        world.submit(one)
    world.run()
    world.assert_served(*asked)
    assert sum(summary.repeats for summary in world.summaries.values()) == 0
    world.assert_at_rest()


def test_growth_beyond_the_decode_pool_preempts_the_newest(depth: int) -> None:
    world = World(depth=depth)
    world.add("prefill-0", "prefill", blocks=64)
    world.add("decode-0", "decode", blocks=14)
    asked = [
        request(f"r{i}", prompt, 30, stop_ids=()) for i, prompt in enumerate(prompts(3, [8] * 4))
    ]
    for one in asked:
        world.submit(one)
    world.run()
    world.assert_served(*asked)
    assert world.summaries["r0"].repeats == 0
    assert world.summaries["r3"].repeats > 0
    world.assert_at_rest()


@pytest.mark.parametrize("policy", ["chunked", "prefill-first"])
def test_a_colocated_instance_recomputes_what_it_preempts(depth: int, policy: str) -> None:
    world = colocated(depth, policy, blocks=14)
    asked = [
        request(f"r{i}", prompt, 30, stop_ids=()) for i, prompt in enumerate(prompts(3, [8] * 4))
    ]
    for one in asked:
        world.submit(one)
    world.run()
    world.assert_served(*asked)
    assert world.workers["colocated-0"].core._load().preemptions > 0
    assert all(summary.repeats == 0 for summary in world.summaries.values())
    world.assert_at_rest()


def test_choices_of_one_prompt_share_their_blocks(depth: int) -> None:
    world = disaggregated(depth=depth)
    asked = [request(f"r{i}", [9] * 21, 4, stop_ids=()) for i in range(4)]
    for one in asked:
        world.submit(one)
    worker = world.workers["prefill-0"]
    world.deliver(worker)
    batches = []
    while (batch := worker.core.schedule(world.now)) is not None:
        batches.append(batch)
        worker.core.commit(batch.id, worker.executor.execute(batch), world.now)
    computed = sum(row.count for batch in batches for row in batch.rows)
    assert computed == 21 + 3 * 1
    world.run()
    world.assert_served(*asked)
    world.assert_at_rest()


def test_prefix_cache_hits_are_counted_and_can_be_bypassed() -> None:
    world = disaggregated()
    prompt = prompts(4, [18])[0]
    params = SamplingParams(max_tokens=2)
    for name, use_cache in (("cold", True), ("warm", True), ("bypass", False)):
        world.submit(Request(id=name, prompt=prompt, params=params, use_cache=use_cache))
        world.run()
    cached = {delta.request: delta.cached_tokens for delta in world.deltas if delta.index == 0}
    assert cached == {"cold": 0, "warm": 16, "bypass": 0}
    world.assert_at_rest()


@pytest.mark.parametrize(("prefix_cache", "place"), [(True, "prefill-0"), (False, "prefill-1")])
def test_like_prompts_meet_where_they_are_cached(prefix_cache: bool, place: str) -> None:
    """The second comes when the first one's instance has something else to do: less than the whole
    prompt would be, but without a cache more than the other instance has."""
    world = disaggregated(2, prefix_cache=prefix_cache)
    first, other = prompts(4, [34, 8])
    world.submit(request("first", first, 2))
    world.run()
    world.submit(request("other", other, 2))
    world.submit(request("second", first, 2))
    started = {
        command.request.id: name
        for name, worker in world.workers.items()
        for order in worker.orders
        for command in order.commands
        if isinstance(command, Start)
    }
    assert started == {"other": "prefill-0", "second": place}
    world.run()
    cached = {delta.request: delta.cached_tokens for delta in world.deltas if delta.index == 0}
    assert cached == {"first": 0, "other": 0, "second": 32 if prefix_cache else 0}
    world.assert_at_rest()


@pytest.mark.parametrize("length", [BLOCK, 4 * BLOCK])
def test_a_prompt_that_is_cached_whole_still_computes_a_token(depth: int, length: int) -> None:
    world = disaggregated(depth=depth)
    asked = [request(name, prompts(4, [length])[0], 3) for name in "ab"]
    for one in asked:
        world.submit(one)
        world.run()
    world.assert_served(*asked)
    world.assert_at_rest()


def test_a_prompt_longer_than_the_chunk_is_computed_in_chunks() -> None:
    world = disaggregated(chunk=16)
    world.submit(request("long", prompts(5, [50])[0]))
    worker = world.workers["prefill-0"]
    counts = []
    world.deliver(worker)
    while (batch := worker.core.schedule(world.now)) is not None:
        counts += [row.count for row in batch.rows]
        worker.core.commit(batch.id, worker.executor.execute(batch), world.now)
    assert counts == [16, 16, 16, 2]


def test_chunked_policy_decodes_beside_a_long_prompt() -> None:
    world = colocated(1, "chunked", chunk=8)
    world.submit(request("running", [1, 2], 40, stop_ids=()))
    world.turn()
    world.submit(request("long", prompts(6, [32])[0], 2))
    before = len(world.outputs["running"])
    for _ in range(4):
        world.turn()
    assert len(world.outputs["running"]) == before + 4
    assert world.outputs["long"] == []


def test_prefill_first_policy_stops_decoding_for_prompts() -> None:
    world = colocated(1, "prefill-first", chunk=8)
    world.submit(request("running", [1, 2], 40, stop_ids=()))
    world.turn()
    world.submit(request("long", prompts(6, [32])[0], 2))
    before = len(world.outputs["running"])
    for _ in range(4):
        world.turn()
    assert len(world.outputs["running"]) == before
    assert len(world.outputs["long"]) == 1


def test_reads_are_bounded_while_sequences_decode() -> None:
    world = disaggregated(read_blocks=2)
    world.submit(request("running", [1, 2], 60, stop_ids=()))
    for _ in range(4):
        world.turn()
    world.submit(request("long", prompts(7, [40])[0], 4, stop_ids=()))
    worker = world.workers["decode-0"]
    sizes = []
    for _ in range(30):
        world.step(world.workers["prefill-0"])
        world.deliver(worker)
        batch = worker.core.schedule(world.now)
        if batch is None:
            break
        sizes += [len(read.blocks) for read in batch.reads]
        assert not batch.reads or batch.decodes, "decoding stood still for a read"
        worker.core.commit(batch.id, worker.executor.execute(batch), world.now)
        world.report(worker)
    assert sizes == [2, 2, 2, 2, 2]


def test_short_prompts_may_be_prefilled_where_they_decode(depth: int) -> None:
    world = disaggregated(depth=depth, local_prefill_below=10)
    asked = [request("short", prompts(8, [9])[0]), request("long", prompts(9, [10])[0])]
    for one in asked:
        world.submit(one)
    world.run()
    world.assert_served(*asked)
    assert world.summaries["short"].prefill_instance == "decode-0"
    assert world.summaries["long"].prefill_instance == "prefill-0"
    world.assert_at_rest()


def test_one_report_per_step_carries_all_tokens_of_the_step() -> None:
    world = colocated(1, "chunked")
    for i in range(6):
        world.submit(request(f"r{i}", [i + 1, 2], 5, stop_ids=()))
    world.run()
    counts = [sum(tokens_in(event) for event in report.events) for report in world.reports]
    assert [count for count in counts if count] == [6] * 5


def tokens_in(event: Event) -> int:
    match event:
        case Decoded() | Tokens():
            return len(event.ids)
    return 0


def test_instances_of_a_phase_share_the_load() -> None:
    world = disaggregated(2, 2)
    asked = [request(f"r{i}", prompts(i, [30])[0], 6, stop_ids=()) for i in range(8)]
    for one in asked:
        world.submit(one)
    world.run()
    world.assert_served(*asked)
    for phase in ("prefill_instance", "decode_instance"):
        names = [getattr(summary, phase) for summary in world.summaries.values()]
        assert sorted(names.count(name) for name in set(names)) == [4, 4]


def test_the_window_keeps_prompts_in_the_router_until_they_are_needed() -> None:
    world = disaggregated(window_tokens=40)
    for number in range(4):
        world.submit(request(f"r{number}", prompts(number, [20])[0], 3))
    assert world.router.queued == 2
    world.run()
    world.assert_at_rest()


def test_what_a_decode_instance_holds_is_not_read_again() -> None:
    """The second turn of a conversation brings only what is new to the decode side."""
    world = disaggregated()
    prompt = prompts(11, [32])[0]
    first = request("first", prompt, 8, stop_ids=())
    world.submit(first)
    world.run()
    second = request("second", prompt + expected_output(first) + [7] * 9, 2, stop_ids=())
    world.submit(second)
    world.step(world.workers["prefill-0"])
    while world.router._jobs["second"].stage == "prefill":
        world.step(world.workers["prefill-0"])
    worker = world.workers["decode-0"]
    world.deliver(worker)
    batch = worker.core.schedule(world.now)
    held = (32 + 8 - 1) // BLOCK
    assert sum(len(read.blocks) for read in batch.reads) == -(-len(second.prompt) // BLOCK) - held
    worker.core.commit(batch.id, worker.executor.execute(batch), world.now)
    world.run()
    world.assert_served(first, second)


@pytest.mark.parametrize("seed", range(3))
def test_local_prompts_and_pulls_do_not_starve_each_other(seed: int) -> None:
    world = World(local_prefill_below=4)
    world.add("prefill-0", "prefill", blocks=128)
    world.add("decode-0", "decode", sequences=2, blocks=16)
    rng = random.Random(seed)
    waited: list[str] = []
    for number in range(120):
        size = rng.choice([2, 30])
        asked = request(f"r{number}", [rng.randrange(1, 50) for _ in range(size)], 3, stop_ids=())
        world.submit(asked)
        waited.append(asked.id)
        for _ in range(4):
            world.turn()
        done = [name for name in waited[:-20] if name in world.finishes]
        assert len(done) == len(waited[:-20]), "an old request is passed by newer ones"
    world.run()
    world.assert_at_rest()


def test_queue_limit_and_window_hold_for_local_prompts_too() -> None:
    world = disaggregated(local_prefill_below=10, max_queue=2, window_tokens=8)
    for number in range(12):
        world.submit(request(f"r{number}", [number + 1, 1, 1], 3))
    assert [failure.status for failure in world.failures.values()].count(429) > 0
    world.run()
    world.assert_at_rest()


def test_a_step_of_one_token_computes_one_token() -> None:
    world = disaggregated(chunk=1)
    world.submit(request("r", prompts(5, [9])[0]))
    worker = world.workers["prefill-0"]
    world.deliver(worker)
    batch = worker.core.schedule(world.now)
    assert [row.count for row in batch.rows] == [1]


def test_pipeline_stages_share_the_running_sequences() -> None:
    """No sequence is in two batches in flight, and each batch has its part of them."""
    world = World(depth=2)
    worker = world.add("colocated-0", "colocated", stages=2, blocks=200, chunk=64)
    asked = [request(f"r{i}", prompts(i, [5])[0], 12, stop_ids=()) for i in range(6)]
    for one in asked:
        world.submit(one)
    sizes = []
    for _ in range(20):
        world.deliver(worker)
        while world.schedule(worker):
            pass
        flying = [batch.decodes for batch in worker.flying]
        assert len({slot for slots in flying for slot in slots}) == sum(map(len, flying))
        sizes += [len(slots) for slots in flying]
        world.commit(worker)
        world.report(worker)
    assert max(sizes) == 3
    world.run()
    world.assert_served(*asked)
    world.assert_at_rest()
