"""How fast an endpoint is when it has nothing else to do, and SLOs relative to that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from statistics import median

from staffel.bench.load import run_load
from staffel.bench.measure import Subject
from staffel.bench.records import Record
from staffel.bench.steady import MIN_REQUESTS
from staffel.bench.workload import Ask
from staffel.config import SLO, ConfigError

FIRST_PROBE = 9
"""Sixth of the budget, in which half as many again are sent as count."""
REQUESTS = 8
"""Requests that are sent one after another; the first one warms up and doesn't count."""


async def one_by_one(subject: Subject, asks: Sequence[Ask]) -> list[Record]:
    """Each request alone: the next is sent when the one before has ended.

    Raises:
        ConfigError: one of them failed; there is nothing to measure then.
    """
    records: list[Record] = []
    for ask in asks:
        await run_load(subject.endpoint, [(0.0, ask)], on_record=records.append, processes=0)
        if records[-1].error is not None:
            raise ConfigError(f"URL: a request failed before the measurement: {records[-1].error}")
    return records


async def unloaded(subject: Subject) -> list[Record]:
    """Requests of the workload, each alone."""
    lengths = list(islice(subject.workload.lengths(0), REQUESTS))
    return (await one_by_one(subject, subject.asks(lengths)))[1:]


def start_rate(records: Sequence[Record], budget_s: float) -> float:
    """A rate to begin a search with: what a server does that takes one request at a time.

    Higher where a first probe would take more than a sixth of the budget: too high a rate shows
    within seconds, too low a one takes long to say anything.
    """
    alone = 1 / median(record.e2e or math.inf for record in records)
    return max(alone, FIRST_PROBE * MIN_REQUESTS / budget_s)


def relative_slo(text: str, records: Sequence[Record]) -> SLO:
    """From "ttft=5x,tpot=1.5x": multiples of the medians of unloaded requests.

    Raises:
        ConfigError: not of that form, or a measure that these requests don't have.
    """
    bounds = {}
    for part in text.split(","):
        name, _, factor = (piece.strip() for piece in part.partition("="))
        if name not in SLO.__struct_fields__ or not factor.endswith("x"):
            raise ConfigError(f"--slo: auto: {part!r} is not like ttft=5x")
        bounds[name] = _factor(factor) * _median(records, name)
    return SLO(**bounds)


def _factor(text: str) -> float:
    try:
        return float(text.removesuffix("x"))
    except ValueError:
        raise ConfigError(f"--slo: auto: {text!r} is no multiple like 1.5x") from None


def _median(records: Sequence[Record], name: str) -> float:
    values = [value for record in records if (value := getattr(record, name)) is not None]
    if not values:
        raise ConfigError(f"--slo: auto: {name}: the workload's replies have no such measure")
    return median(values)
