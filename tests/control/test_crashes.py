"""The crash table of the design, line by line, and messages that are stale or come twice."""

from __future__ import annotations

import msgspec
import pytest

from staffel.control.messages import Cancel, Decoded, Ended, Order, Pulled, Tokens
from staffel.control.request import Request
from tests.control.world import LEASE, SECOND, World, disaggregated, expected_output, request

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3] * 3
"""14 blocks: with `read_blocks=1` an idle decode instance reads it in two steps."""


@pytest.fixture(params=[1, 2], ids=["depth1", "depth2"])
def depth(request) -> int:
    return request.param


def long_request(name: str = "r") -> Request:
    return request(name, PROMPT, 12, stop_ids=())


def until(world: World, stage: str, name: str = "r") -> None:
    """Run step by step until the job is in that stage."""
    for _ in range(100):
        if world.router._jobs[name].stage == stage:
            return
        for worker in list(world.workers.values()):
            world.step(worker)
            if name in world.router._jobs and world.router._jobs[name].stage == stage:
                return
    raise AssertionError(f"never in stage {stage}")


def test_client_leaves_at_any_moment(depth: int) -> None:
    for steps in range(40):
        world = disaggregated(depth=depth, read_blocks=1)
        bystander = request("other", [8, 8, 8], 6, stop_ids=())
        world.submit(long_request())
        world.submit(bystander)
        workers = list(world.workers.values())
        for step in range(steps):
            world.step(workers[step % 2])
        world.cancel("r")
        world.run()
        world.assert_served(bystander)
        world.assert_at_rest()


def test_client_leaves_while_batches_fly(depth: int) -> None:
    """What a batch in flight names is freed when it lands, not before."""
    world = disaggregated(depth=depth)
    world.submit(long_request())
    worker = world.workers["prefill-0"]
    world.deliver(worker)
    assert world.schedule(worker)
    world.cancel("r")
    world.deliver(worker)
    assert worker.core.blocks.available < worker.config.num_blocks
    assert worker.core.report().events == []
    world.commit(worker)
    assert worker.core.blocks.available == worker.config.num_blocks
    world.run()
    world.assert_at_rest()


def test_pin_outlives_a_cancelled_read_until_the_reader_has_stopped() -> None:
    world = disaggregated(read_blocks=1)
    world.workers["decode-0"].depth = 1
    world.submit(long_request())
    until(world, "reading")
    world.cancel("r")
    prefill, decode = world.workers["prefill-0"], world.workers["decode-0"]
    world.step(prefill)
    assert prefill.core._load().pinned == 1
    world.step(decode)
    world.step(prefill)
    assert prefill.core._load().pinned == 0
    world.run()
    world.assert_at_rest()


@pytest.mark.parametrize("stage", ["claimed", "reading"])
def test_decode_instance_dies_before_the_read_is_confirmed(depth: int, stage: str) -> None:
    world = disaggregated(decode=2, depth=depth, read_blocks=1)
    asked = long_request()
    world.submit(asked)
    until(world, stage)
    victim = world.router._jobs["r"].instance.name
    world.kill(victim)
    assert world.workers["prefill-0"].core._load().pinned == 1
    world.run()
    world.assert_served(asked)
    assert world.summaries["r"].repeats == 0, "another decode instance claims the pinned KV"
    world.assert_at_rest()


def test_decode_instance_dies_later(depth: int) -> None:
    world = disaggregated(decode=2, depth=depth)
    asked = long_request()
    world.submit(asked)
    until(world, "decode")
    for _ in range(3):
        world.turn()
    world.kill(world.router._jobs["r"].instance.name)
    world.run()
    world.assert_served(asked)
    assert world.summaries["r"].repeats == 1
    world.assert_at_rest()


@pytest.mark.parametrize("stage", ["prefill", "claimed", "reading"])
def test_prefill_instance_dies_before_the_read_is_confirmed(depth: int, stage: str) -> None:
    world = disaggregated(prefill=2, depth=depth, read_blocks=1, chunk=8)
    asked = long_request()
    world.submit(asked)
    until(world, stage)
    world.kill(world.router._jobs["r"].prefill_instance)
    world.run()
    world.assert_served(asked)
    assert world.summaries["r"].repeats == 1
    world.assert_at_rest()


def test_failed_read_is_tried_once_more(depth: int) -> None:
    world = disaggregated(depth=depth)
    world.workers["decode-0"].executor.failing_reads = 1
    asked = long_request()
    world.submit(asked)
    world.run()
    world.assert_served(asked)
    assert world.summaries["r"].repeats == 0
    world.assert_at_rest()


def test_read_that_fails_twice_takes_the_recovery_path(depth: int) -> None:
    world = disaggregated(depth=depth)
    world.workers["decode-0"].executor.failing_reads = 2
    asked = long_request()
    world.submit(asked)
    world.run()
    world.assert_served(asked)
    assert world.summaries["r"].repeats == 1
    world.assert_at_rest()


def test_read_of_a_lease_that_ran_out_is_thrown_away(depth: int) -> None:
    """The generation is gone when the read is complete: nothing of it is used."""
    world = disaggregated(depth=depth, read_blocks=1)
    asked = long_request()
    world.submit(asked)
    until(world, "reading")
    world.now += 2 * LEASE
    world.step(world.workers["prefill-0"])
    assert world.workers["prefill-0"].core._load().pinned == 0
    world.run()
    world.assert_served(asked)
    assert world.summaries["r"].repeats == 1
    world.assert_at_rest()


def test_router_renews_leases_while_a_pull_waits() -> None:
    world = World()
    world.add("prefill-0", "prefill")
    world.add("decode-0", "decode", sequences=1)
    first, second = request("a", [5] * 9, 30, stop_ids=()), request("b", [6] * 9, 3, stop_ids=())
    world.submit(first)
    until(world, "decode", "a")
    world.submit(second)
    until(world, "claimed", "b")
    for _ in range(8):
        world.tick(LEASE / SECOND / 4)
        world.step(world.workers["prefill-0"])
        assert world.workers["prefill-0"].core._load().pinned == 1
    world.run()
    world.assert_served(first, second)
    world.assert_at_rest()


def test_no_decode_instance_left(depth: int) -> None:
    world = disaggregated(depth=depth)
    world.submit(long_request())
    until(world, "decode")
    world.kill("decode-0")
    assert world.failures["r"].status == 503
    assert world.failures["r"].retry_after
    world.submit(long_request("new"))
    assert world.failures["new"].status == 503
    world.run()
    world.assert_at_rest()


def test_running_ones_finish_when_no_prefill_instance_is_left(depth: int) -> None:
    world = disaggregated(depth=depth)
    running, waiting = long_request(), request("w", PROMPT * 2, 3)
    world.submit(running)
    until(world, "decode")
    world.submit(waiting)
    world.kill("prefill-0")
    assert world.failures["w"].status == 503
    world.run()
    world.assert_served(running)
    world.assert_at_rest()


def test_a_request_that_kills_instances_is_given_up() -> None:
    world = disaggregated(prefill=4)
    world.submit(long_request())
    for _ in range(3):
        assert "r" not in world.failures
        world.kill(world.router._jobs["r"].prefill_instance)
    assert world.failures["r"].status == 503
    world.run()
    world.assert_at_rest()


def test_a_restarted_instance_serves_again(depth: int) -> None:
    world = disaggregated(depth=depth)
    world.kill("decode-0")
    world.add("decode-0", "decode")
    asked = long_request()
    world.submit(asked)
    world.run()
    world.assert_served(asked)
    world.assert_at_rest()


def test_doubled_orders_are_dropped(depth: int) -> None:
    world = disaggregated(depth=depth)
    asked = long_request()
    world.submit(asked)
    for _ in range(60):
        for worker in world.workers.values():
            worker.orders.extend(list(worker.orders))
        if not world.turn():
            break
    world.assert_served(asked)
    assert world.workers["prefill-0"].core._load().started == 1
    world.assert_at_rest()


def test_orders_for_another_incarnation_are_dropped() -> None:
    world = disaggregated()
    worker = world.workers["prefill-0"]
    world.submit(long_request())
    stale = msgspec.structs.replace(worker.orders.popleft(), incarnation=999)
    worker.core.receive(stale, world.now)
    assert worker.core.idle


def test_doubled_and_stale_reports_are_dropped(depth: int) -> None:
    world = disaggregated(depth=depth)
    asked = long_request()
    world.submit(asked)
    while world.turn():
        for report in world.reports:
            world.act(world.router.receive(report, world.now))
            other = msgspec.structs.replace(report, incarnation=999, number=10_000)
            world.act(world.router.receive(other, world.now))
    world.assert_served(asked)
    world.assert_at_rest()


def test_tokens_that_come_twice_in_different_reports_are_not_shown_twice() -> None:
    world = disaggregated()
    asked = long_request()
    world.submit(asked)
    until(world, "decode")
    world.turn()
    report = world.reports[-1]
    assert any(isinstance(event, Decoded) and event.ids for event in report.events)
    worker = world.workers["decode-0"]
    again = msgspec.structs.replace(report, number=report.number + 1)
    world.act(world.router.receive(again, world.now))
    worker.core._last_report += 1
    world.run()
    world.assert_served(asked)


def test_events_of_a_dispatch_that_is_over_change_nothing() -> None:
    world = disaggregated()
    asked = long_request()
    world.submit(asked)
    until(world, "decode")
    source = world.workers["prefill-0"]
    world.step(source)
    late = msgspec.structs.replace(
        world.reports[0],
        number=1000,
        events=[Pulled(1, 0), Tokens(1, 5, [9], finish="stop"), Ended(1)],
    )
    world.act(world.router.receive(late, world.now))
    world.run()
    world.assert_served(asked)


def test_cancel_of_an_unknown_dispatch_is_answered() -> None:
    world = disaggregated()
    worker = world.workers["decode-0"]
    worker.core.receive(Order(worker.config.incarnation, 1, [Cancel(77)]), 0)
    assert worker.core.report().events == [Ended(77)]


def test_queue_limit_refuses_with_429() -> None:
    world = disaggregated(max_queue=2, window_tokens=1)
    asked = [request(f"r{i}", [i + 1] * 6, 3) for i in range(4)]
    for one in asked:
        world.submit(one)
    assert world.failures["r3"].status == 429
    assert world.failures["r3"].retry_after
    world.run()
    world.assert_served(*asked[:3])
    world.assert_at_rest()


@pytest.mark.parametrize("stage", ["queued", "prefill", "claimed", "reading", "decode"])
def test_request_timeout_ends_a_request_in_any_stage(stage: str) -> None:
    world = disaggregated(request_timeout_ns=60 * SECOND, window_tokens=1, read_blocks=1)
    if stage == "queued":
        world.submit(request("ahead", [2] * 9, 3))
    world.submit(long_request())
    if stage != "queued":
        until(world, stage)
    world.tick(59)
    assert "r" not in world.failures
    world.tick(2)
    assert world.failures["r"].status == 504
    world.run()
    world.assert_at_rest()


def test_expected_output_depends_on_every_id_before() -> None:
    """The tests' own footing: a wrong context would show."""
    a, b = request("a", [1, 2, 3], 20, stop_ids=()), request("b", [1, 2, 4], 20, stop_ids=())
    assert expected_output(a) != expected_output(b)


def test_a_loss_noticed_late_for_another_incarnation_changes_nothing() -> None:
    world = disaggregated()
    asked = long_request()
    world.submit(asked)
    world.act(world.router.lost("decode-0", 999, world.now))
    world.run()
    world.assert_served(asked)


def test_readers_are_told_to_stop_and_to_unmap_when_their_source_dies() -> None:
    world = disaggregated(read_blocks=1)
    world.submit(long_request())
    until(world, "reading")
    world.kill("prefill-0")
    told = [c for order in world.workers["decode-0"].orders for c in order.commands]
    assert [type(command).__name__ for command in told] == ["Detach", "Cancel"]


def test_recovered_requests_keep_their_order() -> None:
    world = disaggregated(prefill=2)
    for number in range(6):
        world.submit(request(f"r{number}", [number + 1] * 40, 3))
    on_first = [name for name, job in world.router._jobs.items() if job.instance.name[-1] == "0"]
    world.router.config = msgspec.structs.replace(world.router.config, window_tokens=1)
    world.kill("prefill-0")
    assert len(on_first) > 1
    assert [job.request.id for job in world.router._queue.jobs] == on_first


def test_a_pin_outlives_its_lease_while_a_cancelled_read_winds_up() -> None:
    world = disaggregated(read_blocks=1)
    world.submit(long_request())
    until(world, "reading")
    world.cancel("r")
    for _ in range(4):
        world.tick(LEASE / SECOND / 2)
        world.step(world.workers["prefill-0"])
    assert world.workers["prefill-0"].core._load().pinned == 1
    world.run()
    world.assert_at_rest()


def test_an_instance_that_comes_back_before_its_loss_is_noticed(depth: int) -> None:
    world = disaggregated(decode=2, depth=depth)
    asked = long_request()
    world.submit(asked)
    until(world, "decode")
    name = world.router._jobs["r"].instance.name
    world.add(name, "decode")
    world.run()
    world.assert_served(asked)
    assert world.summaries["r"].losses == 1
    world.assert_at_rest()


def test_kv_that_nobody_can_read_doesnt_cost_prefills_for_ever(depth: int) -> None:
    world = disaggregated(depth=depth)
    world.workers["decode-0"].executor.failing_reads = 10**6
    world.submit(long_request())
    world.run()
    assert world.failures["r"].status == 503
    assert "read" in world.failures["r"].message
    assert world.summaries["r"].failed_reads == 4
    assert world.summaries["r"].repeats == 1
    world.workers["decode-0"].executor.failing_reads = 0
    again = long_request("again")
    world.submit(again)
    world.run()
    world.assert_served(again)
    world.assert_at_rest()


# ---- requests that may be what kills


def holder(world: World, name: str) -> str:
    """The instance that has the request."""
    return next(
        instance.name
        for instance in world.router._instances.values()
        if any(job.request.id == name for job in instance.jobs.values())
    )


def test_a_request_that_has_cost_two_instances_runs_alone(depth: int) -> None:
    world = World(depth=depth)
    for number in range(4):
        world.add(f"colocated-{number}", "colocated", chunk=4)
    suspect = long_request("suspect")
    world.submit(suspect)
    for _ in range(2):
        world.turn()
        world.kill(holder(world, "suspect"))
    others = [request(f"r{i}", [i + 1] * 9, 30, stop_ids=()) for i in range(6)]
    for one in others:
        world.submit(one)
    beside = set()
    while world.router.running:
        world.turn()
        for instance in world.router._instances.values():
            names = {job.request.id for job in instance.jobs.values()}
            if "suspect" in names:
                beside |= names - {"suspect"}
        assert world.now < SECOND
    assert not beside
    world.run()
    world.assert_served(suspect, *others)
    world.assert_at_rest()


def test_it_waits_until_an_instance_is_free(depth: int) -> None:
    world = World(depth=depth)
    for number in range(3):
        world.add(f"colocated-{number}", "colocated")
    suspect, busy = long_request("suspect"), request("busy", [3] * 9, 20, stop_ids=())
    world.submit(suspect)
    world.turn()
    world.kill(holder(world, "suspect"))
    world.turn()
    world.submit(busy)
    world.turn()
    assert holder(world, "busy") != holder(world, "suspect")
    world.kill(holder(world, "suspect"))
    while "busy" not in world.finishes:
        assert world.router.queued == 1
        world.turn()
    world.run()
    world.assert_served(busy, suspect)
    world.assert_at_rest()


def test_alone_on_prefill_and_decode_instances(depth: int) -> None:
    world = disaggregated(3, 2, depth=depth, read_blocks=1)
    suspect, other = long_request("suspect"), request("other", [7] * 9, 12, stop_ids=())
    world.submit(suspect)
    for _ in range(2):
        world.turn()
        world.kill(holder(world, "suspect"))
    world.submit(other)
    for _ in range(200):
        world.turn()
        for instance in world.router._instances.values():
            names = {job.request.id for job in instance.jobs.values()}
            assert names != {"suspect", "other"}
    world.run()
    world.assert_served(suspect, other)
    world.assert_at_rest()


# ---- when to come back


def test_retry_after_is_how_long_the_queue_takes() -> None:
    """Forty wait, and one leaves every two seconds."""
    world = World(max_queue=40, window_tokens=1)
    world.add("colocated-0", "colocated", blocks=16, sequences=1)
    for number in range(60):
        world.submit(request(f"r{number}", [1] * 6, 1))
    assert world.failures["r59"].retry_after == 1, "nothing is known of its speed yet"
    for _ in range(10):
        before = world.router.queued
        while world.router.queued == before:
            world.turn()
        world.now += 2 * SECOND
    while world.router.queued < 40:
        world.submit(request(f"more{world.router.queued}", [1] * 6, 1))
    world.submit(request("last", [1] * 6, 1))
    assert 70 <= world.failures["last"].retry_after <= 82
