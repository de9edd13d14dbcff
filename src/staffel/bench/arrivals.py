"""When requests are sent: arrival processes, seeded and pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Literal, cast

import numpy as np
from msgspec import Struct

from staffel.config import ConfigError

Kind = Literal["poisson", "gamma", "constant", "trace"]
_BATCH = 1024


class Arrivals(Struct, frozen=True):
    """An arrival process, apart from its rate."""

    kind: Kind
    cv: float = 1.0
    """Coefficient of variation of the gaps; of gamma only. 1 is Poisson, above it is burstier."""

    @classmethod
    def parse(cls, text: str) -> Arrivals:
        """From "poisson", "gamma:2" (its CV), "constant" or "trace".

        Raises:
            ConfigError: anything else.
        """
        kind, _, value = text.strip().partition(":")
        if kind == "gamma":
            return cls("gamma", _positive(value, "--arrivals: gamma's CV, as in gamma:2"))
        for plain in ("poisson", "constant", "trace"):
            if text.strip() == plain:
                return cls(cast(Kind, plain))
        raise ConfigError(f"--arrivals: {text!r} is none of poisson, gamma:CV, constant and trace")

    def __str__(self) -> str:
        return f"gamma:{self.cv:g}" if self.kind == "gamma" else self.kind


def arrival_times(
    process: Arrivals, rate: float, seed: int, trace: Sequence[float] | None = None
) -> Iterator[float]:
    """Seconds from the start of the schedule, rising, at a mean of `rate` a second.

    Endless, but for a trace: that is shifted to begin at 0, scaled in time to the mean rate (the
    pattern stays, relative to the gaps), and ends where the trace ends. Gaps of gamma have the
    shape 1 / CV² and the mean 1 / rate.

    Raises:
        ConfigError: a rate that isn't above 0; a trace that is asked for but isn't there, has no
            length, or goes back in time.
    """
    if not (math.isfinite(rate) and rate > 0):
        raise ConfigError("--rate: must be a number of requests per second above 0")
    if process.kind == "trace":
        return _scaled(_checked(trace), rate)
    if process.kind == "constant":
        return (count / rate for count in itertools.count(1))
    return itertools.accumulate(_gaps(process, rate, np.random.default_rng(seed)))


def trace_rate(trace: Sequence[float]) -> float:
    """A trace's own mean rate: its gaps per second. Raises ConfigError as `arrival_times` does."""
    times = _checked(trace)
    return (len(times) - 1) / (times[-1] - times[0])


def _gaps(process: Arrivals, rate: float, random: np.random.Generator) -> Iterator[float]:
    shape = 1 / process.cv**2 if process.kind == "gamma" else 1.0
    while True:
        yield from random.gamma(shape, 1 / (shape * rate), _BATCH).tolist()


def _scaled(times: Sequence[float], rate: float) -> Iterator[float]:
    factor = trace_rate(times) / rate
    return ((time - times[0]) * factor for time in times)


def _checked(trace: Sequence[float] | None) -> Sequence[float]:
    if trace is None:
        raise ConfigError("--arrivals: trace: the workload has no arrival times; take poisson")
    if any(later < earlier for earlier, later in itertools.pairwise(trace)):
        raise ConfigError("--arrivals: trace: the workload's arrival times go back; sort them")
    if len(trace) < 2 or trace[-1] <= trace[0]:
        raise ConfigError("--arrivals: trace: the workload's arrival times span no time")
    return trace


def _positive(text: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{what}: {text!r} is not a number above 0")
    return value
