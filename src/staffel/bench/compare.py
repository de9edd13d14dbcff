"""Goodput per device of several measurements, if they can be compared at all."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from staffel.bench.results import Interval, Result
from staffel.config import ConfigError


class Row(Struct, frozen=True):
    """One measurement beside the others."""

    label: str
    devices: int
    goodput: Interval | None
    per_device: Interval | None
    ratio: Interval | None
    """Per device, to the first row's; None where one of them has no goodput."""


def comparison(results: Sequence[Result]) -> list[Row]:
    """One row each, in the order given; ratios are to the first.

    Raises:
        ConfigError: they were measured under different SLOs, targets, workloads or arrivals.
    """
    first = results[0]
    for other in results[1:]:
        _check_alike(first, other)
    base = _per_device(first)
    return [
        Row(r.label, r.devices, r.goodput, _per_device(r), _ratio(_per_device(r), base))
        for r in results
    ]


def _check_alike(first: Result, other: Result) -> None:
    for field, what in (
        ("kind", "kinds of measurement"),
        ("slo", "SLOs"),
        ("target", "targets (--attainment)"),
        ("workload", "workloads"),
        ("arrivals", "arrival processes"),
    ):
        mine, theirs = getattr(first, field), getattr(other, field)
        if mine != theirs:
            raise ConfigError(
                f"{first.label} and {other.label} can't be compared: different {what} "
                f"({mine} and {theirs}); measure both the same way"
            )


def _per_device(result: Result) -> Interval | None:
    found = result.goodput
    if found is None:
        return None
    n = result.devices
    return Interval(found.value / n, found.low / n, found.high / n)


def _ratio(rate: Interval | None, base: Interval | None) -> Interval | None:
    """Of two independent estimates; its ends take each side's worst, so it is conservative."""
    if rate is None or base is None or base.value <= 0:
        return None
    high = rate.high / base.low if base.low > 0 else float("inf")
    return Interval(rate.value / base.value, rate.low / base.high, high)
