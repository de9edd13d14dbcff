"""Sequences with a grammar: they wait for it without holding anybody up, and fail where it does."""

from __future__ import annotations

import msgspec
import pytest

from staffel.control.journal import record, replay
from tests.control.world import World, disaggregated, request

PROMPT = list(range(1, 10))


def asked(name: str = "r", grammar: str = "g", tokens: int = 8):
    return request(name, PROMPT, tokens, stop_ids=(), grammar=grammar)


def preparing(world: World) -> World:
    for worker in world.workers.values():
        worker.problems = {}
    return world


def now_ready(world: World, grammar: str = "g", problem: str | None = None) -> None:
    for worker in world.workers.values():
        worker.problems[grammar] = problem


@pytest.fixture(params=[1, 2])
def depth(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(params=["apart", "together"])
def world(request: pytest.FixtureRequest, depth: int) -> World:
    """Instances at which grammars are never ready by themselves."""
    if request.param == "apart":
        return preparing(disaggregated(depth=depth))
    made = World(depth=depth)
    made.add("colocated-0", "colocated")
    return preparing(made)


def test_others_go_on_while_a_grammar_is_prepared(world: World) -> None:
    waiting, other = asked(), request("other", PROMPT)
    world.submit(waiting)
    world.submit(other)
    world.run()
    world.assert_served(other)
    assert world.outputs["r"] == []
    now_ready(world)
    world.run()
    world.assert_served(waiting)
    world.assert_at_rest()


def test_several_wait_for_the_same_grammar(world: World) -> None:
    several = [asked(f"r{i}") for i in range(3)]
    for one in several:
        world.submit(one)
    world.run()
    assert next(iter(world.workers.values())).core.unprepared == ["g"]
    now_ready(world)
    world.run()
    world.assert_served(*several)
    world.assert_at_rest()


def test_a_grammar_that_cant_be_followed(world: World) -> None:
    world.submit(asked())
    world.submit(asked("good", "fine"))
    now_ready(world, "g", "it makes no sense")
    now_ready(world, "fine")
    world.run()
    assert world.failures["r"].status == 400
    assert "it makes no sense" in world.failures["r"].message
    world.assert_served(asked("good", "fine"))
    world.assert_at_rest()


def test_one_that_only_the_decode_instance_cant_prepare() -> None:
    world = preparing(disaggregated())
    world.workers["prefill-0"].problems["g"] = None
    world.workers["decode-0"].problems["g"] = "no memory"
    world.submit(asked())
    world.run()
    assert "no memory" in world.failures["r"].message
    world.assert_at_rest()


@pytest.mark.parametrize("place", [1, 2, 5])
def test_a_grammar_that_gives_up_in_the_middle(world: World, place: int) -> None:
    now_ready(world)
    for worker in world.workers.values():
        worker.executor.failing_at = len(PROMPT) + place
    other = request("other", PROMPT)
    world.submit(asked())
    world.submit(other)
    world.run()
    assert world.failures["r"].status == 400
    assert "gave up" in world.failures["r"].message
    assert len(world.outputs["r"]) == place - 1
    world.assert_served(other)
    world.assert_at_rest()


def test_a_client_that_leaves_while_it_is_prepared(world: World) -> None:
    world.submit(asked())
    world.submit(asked("stays"))
    world.run()
    world.cancel("r")
    world.run()
    assert any(worker.core.unprepared == ["g"] for worker in world.workers.values())
    world.cancel("stays")
    world.run()
    assert all(not worker.core.unprepared for worker in world.workers.values())
    world.assert_at_rest()


def test_an_instance_that_dies_while_it_is_prepared(depth: int) -> None:
    world = preparing(disaggregated(2, 2, depth=depth))
    one = asked()
    world.submit(one)
    world.run()
    world.kill("prefill-0")
    now_ready(world)
    world.workers["decode-0"].problems = {}
    world.run()
    world.kill("decode-0")
    world.run()
    world.assert_served(one)
    world.assert_at_rest()


def test_it_is_replayed(depth: int) -> None:
    world = preparing(disaggregated(depth=depth))
    lines: list[bytes] = []
    for name, worker in world.workers.items():
        record(worker.core, "engine", name, lines.append)
    world.submit(asked())
    world.submit(asked("bad", "b"))
    now_ready(world)
    now_ready(world, "b", "bad")
    world.run()
    calls = {msgspec.json.decode(line)["call"] for line in lines}
    assert "prepared" in calls
    assert replay(lines).mismatch is None
