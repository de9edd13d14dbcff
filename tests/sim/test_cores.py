"""Whose cores server and clients use."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from staffel.config import ConfigError
from staffel.sim.cores import MEMORY_NS, Idleness, take
from staffel.sim.models import HostCpu


@dataclass
class Core:
    """An instance's, as far as it matters."""

    working: bool
    idle: float
    given: float = 0.0

    def idleness(self, now: int) -> float:
        return self.idle

    def give(self, seconds: float) -> None:
        self.given += seconds


def test_an_idle_core_costs_nobody_anything() -> None:
    cores = [Core(True, 0.0), Core(False, 0.5)]
    take(1.0, cores, 0)
    assert [core.given for core in cores] == [0, 0]


def test_all_that_is_taken_is_given_and_most_of_it_by_who_was_idle() -> None:
    cores = [Core(True, 0.5), Core(True, 0.0)]
    take(1.0, cores, 0)
    assert sum(core.given for core in cores) == pytest.approx(1.0)
    assert cores[0].given > 0.75


def test_cores_that_are_never_idle_give_alike() -> None:
    cores = [Core(True, 0.0), Core(True, 0.0)]
    take(1.0, cores, 0)
    assert [core.given for core in cores] == [0.5, 0.5]


def test_idleness_is_of_the_recent_past() -> None:
    found = Idleness()
    now, period = 0, MEMORY_NS // 10
    for _ in range(200):
        found.note(now, idle=False)
        found.note(now + period // 4, idle=True)
        now += period
    assert found.share(now) == pytest.approx(0.75, abs=0.05)
    found.note(now, idle=False)
    assert found.share(now + 10 * MEMORY_NS) == pytest.approx(0, abs=0.01)


def test_saying_it_twice_changes_nothing() -> None:
    once, twice = Idleness(), Idleness()
    for found in (once, twice):
        found.note(0, idle=False)
    twice.note(MEMORY_NS // 2, idle=False)
    assert twice.share(MEMORY_NS) == once.share(MEMORY_NS)


def test_costs_are_read_in_milliseconds() -> None:
    cost = HostCpu.parse("8,1,0.5", "--host-cpu")
    assert cost == HostCpu(0.008, 0.001, 0.0005)
    # A step of three tokens, with which one request ends.
    assert cost.seconds(3, 1) == pytest.approx(0.001 + 3 * 0.0005 + 0.004)
    assert cost.seconds(0, 0) == 0


@pytest.mark.parametrize("text", ["", "7", "7,1", "7,1,-1", "7,1,nan", "7,1,inf", "a,b,c"])
def test_what_says_no_three_costs_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--host-cpu"):
        HostCpu.parse(text, "--host-cpu")
