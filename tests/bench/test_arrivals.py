"""Arrival processes: their rate, their shape, their seed, and what is refused."""

from __future__ import annotations

from itertools import islice, pairwise
from statistics import fmean, pstdev

import pytest

from staffel.bench.arrivals import Arrivals, arrival_times, trace_rate
from staffel.config import ConfigError


def gaps(text: str, rate: float, count: int = 50_000, seed: int = 1) -> list[float]:
    times = islice(arrival_times(Arrivals.parse(text), rate, seed), count)
    return [later - earlier for earlier, later in pairwise([0.0, *times])]


@pytest.mark.parametrize(
    ("text", "cv"), [("poisson", 1), ("gamma:2", 2), ("gamma:0.5", 0.5), ("constant", 0)]
)
def test_mean_rate_and_variation_are_those_asked_for(text: str, cv: float) -> None:
    found = gaps(text, rate=20)
    assert fmean(found) == pytest.approx(1 / 20, rel=0.03)
    assert pstdev(found) / fmean(found) == pytest.approx(cv, abs=0.05)


def test_the_seed_decides_the_times() -> None:
    assert gaps("poisson", 5, 2000, seed=7) == gaps("poisson", 5, 2000, seed=7)
    assert gaps("poisson", 5, 2000, seed=7) != gaps("poisson", 5, 2000, seed=8)


def test_poisson_at_another_rate_is_the_same_pattern_scaled() -> None:
    slow, fast = gaps("poisson", 1, 100), gaps("poisson", 4, 100)
    assert [gap / 4 for gap in slow] == pytest.approx(fast)


def test_a_trace_is_scaled_to_the_rate_and_ends() -> None:
    trace = [10.0, 11.0, 13.0, 20.0]
    assert trace_rate(trace) == pytest.approx(0.3)
    times = list(arrival_times(Arrivals.parse("trace"), 0.6, 1, trace))
    assert times == pytest.approx([0.0, 0.5, 1.5, 5.0])


@pytest.mark.parametrize("text", ["", "uniform", "gamma", "gamma:0", "gamma:x", "poisson:2"])
def test_unknown_processes_are_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--arrivals"):
        Arrivals.parse(text)


@pytest.mark.parametrize("text", ["poisson", "gamma:2", "constant", "trace"])
def test_a_process_reads_as_it_is_written(text: str) -> None:
    assert str(Arrivals.parse(text)) == text


@pytest.mark.parametrize("rate", [0, -1, float("nan"), float("inf")])
def test_a_rate_must_be_above_zero(rate: float) -> None:
    with pytest.raises(ConfigError, match="--rate"):
        arrival_times(Arrivals("poisson"), rate, 1)


@pytest.mark.parametrize(
    ("trace", "what"),
    [(None, "no arrival times"), ([1.0], "span no time"), ([2.0, 1.0], "go back")],
)
def test_a_useless_trace_is_refused(trace: list[float] | None, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        arrival_times(Arrivals("trace"), 1, 1, trace)
