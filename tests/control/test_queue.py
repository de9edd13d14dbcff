"""Who is next: client requests take turns, and what was on its way comes before what is new."""

from __future__ import annotations

import msgspec

from staffel.control.jobs import Job
from staffel.control.queue import FairQueue
from tests.control.world import World, request


def jobs(*groups: str) -> list[Job]:
    made = []
    for number, group in enumerate(groups):
        asked = msgspec.structs.replace(request(f"{group}{number}", [1, 2]), group=group)
        made.append(Job(asked, number, 0))
    return made


def served(queue: FairQueue) -> list[str]:
    order = []
    while (job := queue.first) is not None:
        queue.serve(job)
        order.append(job.request.id)
    assert len(queue) == 0
    return order


def test_client_requests_take_turns() -> None:
    queue = FairQueue()
    for job in jobs("a", "a", "a", "a", "b", "c", "c"):
        queue.add(job)
    assert len(queue) == 7
    assert served(queue) == ["a0", "b4", "c5", "a1", "c6", "a2", "a3"]


def test_single_ones_are_first_come_first_served() -> None:
    queue = FairQueue()
    for job in jobs("", "", ""):
        queue.add(job)
    assert served(queue) == ["0", "1", "2"]


def test_what_was_on_its_way_comes_first_the_oldest_before_others() -> None:
    queue, (first, second, third, new) = FairQueue(), jobs("a", "a", "b", "c")
    queue.add(new)
    for job in (third, first, second):
        queue.add_again(job)
    assert served(queue) == ["a0", "a1", "b2", "c3"]


def test_those_that_leave_are_gone() -> None:
    queue, made = FairQueue(), jobs("a", "a", "b")
    for job in made:
        queue.add(job)
    queue.add_again(made[2])
    queue.remove(made[0])
    queue.remove(made[0])
    queue.remove(made[2])
    queue.remove(made[2])
    assert made[0] not in queue
    assert made[1] in queue
    assert served(queue) == ["a1"]


def test_one_with_a_thousand_choices_lets_others_through() -> None:
    world = World(max_queue=2000, window_tokens=1)
    world.add("colocated-0", "colocated", blocks=256)
    many = [
        msgspec.structs.replace(request(f"many{n}", [1] * 6, 1), group="many") for n in range(1000)
    ]
    for one in many:
        world.submit(one)
    world.turn()
    late = request("late", [2] * 6, 1)
    world.submit(late)
    while "late" not in world.finishes:
        world.turn()
    assert len(world.finishes) < 10
    world.run()
    world.assert_served(late, *many)
    world.assert_at_rest()
