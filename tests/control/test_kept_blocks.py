"""What stays in memory after it is computed: blocks for the prefix cache, and pinned sequences."""

from __future__ import annotations

import pytest

from staffel.control.messages import Order, Renew
from tests.control.world import BLOCK, LEASE, World, disaggregated, expected_output, request


@pytest.mark.parametrize("depth", [1, 2])
def test_what_was_generated_is_found_by_the_next_turn(depth: int) -> None:
    """8 prompt tokens and 9 of output: 16 are computed, 4 whole blocks."""
    world = World(depth=depth)
    world.add("colocated-0", "colocated")
    first = request("first", [1, 2, 3, 4, 5, 6, 7, 8], 9, stop_ids=())
    world.submit(first)
    world.run()
    second = request("second", first.prompt + expected_output(first) + [9], 2, stop_ids=())
    world.submit(second)
    world.run()
    assert world.summaries["second"].cached_tokens == 4 * BLOCK
    world.assert_served(first, second)
    world.assert_at_rest()


def test_what_is_being_generated_is_found_too() -> None:
    world = World()
    worker = world.add("colocated-0", "colocated", blocks=200)
    first = request("first", [1, 2, 3, 4], 100, stop_ids=())
    world.submit(first)
    while len(world.outputs["first"]) < 10:
        world.step(worker)
    second = request("second", first.prompt + world.outputs["first"], 2, stop_ids=())
    world.submit(second)
    world.run()
    assert world.summaries["second"].cached_tokens == 3 * BLOCK
    world.assert_served(first, second)


def test_each_pin_has_its_own_lease() -> None:
    """The first one's is renewed, the second one's is not and ends."""
    world = disaggregated()
    for name, token in (("a", 1), ("b", 2)):
        world.submit(request(name, [token] * 9, 5, stop_ids=()))
    worker = world.workers["prefill-0"]
    while worker.core._load().pinned < 2:
        world.step(worker)
    first = min(worker.core._pinned)
    world.now += LEASE // 2
    order = Order(worker.config.incarnation, 1000, [Renew([first])])
    worker.core.receive(order, world.now)
    world.now += LEASE * 3 // 4
    worker.core.schedule(world.now)
    assert list(worker.core._pinned) == [first]
