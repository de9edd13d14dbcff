"""Measuring a machine: how long the executor's steps take, alone and beside a busy neighbour.

Every round measures all there is to measure once, in an order drawn anew, so that a machine that
slows down slows all alike; what counts is each one's median over the rounds.
"""

from __future__ import annotations

import os
import platform
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from statistics import median
from time import monotonic
from typing import TypeVar

import numpy as np
from scipy.optimize import nnls
from scipy.stats import trim_mean

import staffel
from staffel.config import ConfigError, InstanceSpec, ModelSpec
from staffel.control.messages import KvRegion
from staffel.latency.fit import Fit, Point, fit
from staffel.latency.hardware import WEIGHT_BYTES
from staffel.latency.profile import Profile, Slowdown, TransferModel
from staffel.model.shapes import BatchShape, Limits, Plan, RoughCost, make_plan
from staffel.model.stations import Station
from staffel.model.timing import Setup

LEAST_ROUNDS, MOST_ROUNDS = 3, 7
REST = "rest"
"""What a neighbour does that does nothing."""

_COPY_REPEATS = 3

T = TypeVar("T")
Watch = Callable[[float, float], None]
"""Is told how many of how many seconds of measuring are done, roughly."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What to measure, and for how long."""

    model: ModelSpec
    spec: InstanceSpec
    """The instance; its role and threads don't matter here."""
    threads: int
    budget: float
    """Seconds that measuring may take, loading not counted."""


@dataclass
class Times:
    """Seconds of each repetition, by what was measured."""

    steps: defaultdict[tuple[str, BatchShape], list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """By what the neighbour did, and the shape."""
    copies: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    """By blocks."""
    interrupted: bool = False


def profile(wanted: Wanted, watch: Watch) -> Profile:
    """Measure, and fit what was measured. Ctrl-C ends the measuring early and keeps what there is.

    Raises:
        ConfigError: the model can't be served so, the budget is too short for it, or too little
            was measured when it was interrupted.
    """
    own, other = share_cores(wanted.threads, sorted(os.sched_getaffinity(0)))
    with ExitStack() as stack:
        pair = [
            stack.enter_context(Station(_setup(wanted, cores, number)))
            for number, cores in enumerate((own, other))
        ]
        station, neighbour = pair
        region = station.ready().region
        station.attach(neighbour.ready().region)
        limits = _limits(wanted, region)
        plan = make_plan(
            limits,
            _rough_cost(station, limits),
            wanted.budget / LEAST_ROUNDS,
            # Instances on GPUs have one each; two that share one would only take turns.
            beside=other is not None and wanted.spec.device != "cuda",
        )
        times = measure(plan, station, neighbour, wanted.budget, watch)
    return conclude(wanted, region, times)


def share_cores(threads: int, cores: list[int]) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Cores of the instance that is measured, and of its neighbour; None: not enough are left.

    Raises:
        ConfigError: more threads than cores.
    """
    if threads > len(cores):
        raise ConfigError(f"--threads: {threads}, and there are {len(cores)} cores")
    other = tuple(cores[threads : 2 * threads])
    return tuple(cores[:threads]), other if len(other) == threads else None


def _setup(wanted: Wanted, cores: tuple[int, ...] | None, number: int) -> Setup:
    return Setup(
        model=wanted.model, spec=wanted.spec, threads=wanted.threads, cores=cores,
        gpu_turn=(number, 2),
    )  # fmt: skip


def _limits(wanted: Wanted, region: KvRegion) -> Limits:
    return Limits(wanted.model.max_model_len, region.num_blocks, region.block_size, region.slots)


def _rough_cost(station: Station, limits: Limits) -> RoughCost:
    """From three shapes, the better of two times each: the first touches memory and warms up."""
    tokens = min(64, limits.max_model_len // 2)
    shapes = [
        BatchShape(decodes=1, context=8),
        BatchShape(decodes=8, context=8),
        BatchShape(prompts=1, new=tokens),
    ]
    one, eight, prompt = (min(station.measure(shape) for _ in range(2)) for shape in shapes)
    return RoughCost(
        step=one,
        per_prompt_token=max(prompt - one, 0.0) / tokens,
        per_decode=max(eight - one, 0.0) / 7,
    )


# ---- measuring


def measure(plan: Plan, station: Station, neighbour: Station, budget: float, watch: Watch) -> Times:
    """Rounds until the budget's seconds are up, or somebody presses Ctrl-C."""
    times = Times()
    draw = random.Random(0)
    rounds = min(max(int(budget / plan.seconds), LEAST_ROUNDS), MOST_ROUNDS)
    deadline, done = monotonic() + budget, 0.0
    try:
        for number in range(rounds):
            for cost in _round(plan, times, station, neighbour, draw):
                done += cost
                watch(done, rounds * plan.seconds)
                if number and monotonic() > deadline:
                    return times
    except KeyboardInterrupt:
        times.interrupted = True
    return times


def _round(
    plan: Plan, times: Times, station: Station, neighbour: Station, draw: random.Random
) -> Iterator[float]:
    """Measure all once; gives what each was expected to take, in seconds, when it is done."""
    for blocks in _shuffled(plan.copies * _COPY_REPEATS, draw):
        seconds = station.copy(blocks)  # looked up after it: Ctrl-C may come meanwhile
        times.copies[blocks].append(seconds)
    for mode in _shuffled([REST, *plan.neighbour], draw):
        if mode != REST:
            neighbour.repeat(plan.neighbour[mode])
        for shape in _shuffled(plan.shapes if mode == REST else plan.reference, draw):
            seconds = station.measure(shape)
            times.steps[mode, shape].append(seconds)
            yield plan.expected(shape, beside=mode != REST)
        neighbour.rest()


def _shuffled(items: list[T], draw: random.Random) -> list[T]:
    return draw.sample(items, len(items))


# ---- conclusions


def conclude(wanted: Wanted, region: KvRegion, times: Times) -> Profile:
    """The profile of what was measured.

    Raises:
        ConfigError: too little was, as measuring was interrupted.
    """
    fitted = _fitted(times)
    return Profile(
        model=wanted.model.name,
        dtype=region.dtype,
        quantization=wanted.spec.quantization,
        device="cpu" if wanted.spec.device == "auto" else wanted.spec.device,
        threads=wanted.threads,
        cores=os.cpu_count() or 0,
        versions=_versions(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        kv_bytes_per_token=_token_bytes(region),
        models={1: fitted.model},
        errors={1: fitted.errors},
        transfer=fit_transfer(times.copies, _token_bytes(region) * region.block_size),
        slowdown=slowdowns(times),
        interrupted=times.interrupted,
    )


def _versions() -> dict[str, str]:
    libraries = {name: version(name) for name in ("torch", "transformers")}
    return {"staffel": staffel.__version__, "python": platform.python_version(), **libraries}


def _fitted(times: Times) -> Fit:
    try:
        return fit(points(times))
    except ConfigError as error:
        if times.interrupted:
            raise ConfigError(f"interrupted too early, nothing is kept: {error}") from None
        raise


def points(times: Times) -> list[Point]:
    """What the fit takes: the medians of steps beside a neighbour at rest."""
    return [
        Point(shape.work, median(seconds))
        for (mode, shape), seconds in times.steps.items()
        if mode == REST
    ]


def slowdowns(times: Times) -> dict[str, dict[str, Slowdown]]:
    """By a step's phase and what the neighbour computes.

    A step's time beside a neighbour is a mean, but for the longest and the shortest tenth: two that
    decode get each weight from memory once for both, or each for itself, by how far apart they are
    in the model, and the median is one or the other.
    """
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for (mode, shape), seconds in times.steps.items():
        alone = times.steps.get((REST, shape))
        if mode != REST and alone:
            of_phase = found.setdefault(shape.phase, {})
            pair = median(alone), float(trim_mean(seconds, 0.1))
            of_phase.setdefault(mode, []).append(pair)
    return {
        phase: {mode: fit_slowdown(pairs) for mode, pairs in modes.items()}
        for phase, modes in found.items()
    }


def fit_slowdown(pairs: Sequence[tuple[float, float]]) -> Slowdown:
    """By non-negative least squares of the relative error: no neighbour makes a step faster.

    Args:
        pairs: seconds of steps alone, and beside the neighbour.
    """
    alone, beside = np.array(pairs).T
    if len(pairs) == 1:
        return Slowdown(share=max(0.0, float(beside[0] / alone[0] - 1)))
    rows = np.stack([1 / alone, np.ones_like(alone)], axis=1)
    (fixed, share), _ = nnls(rows, beside / alone - 1)
    return Slowdown(fixed_s=float(fixed), share=float(share))


def fit_transfer(copies: dict[int, list[float]], block_bytes: int) -> TransferModel:
    """Seconds = fixed + bytes / speed, by least squares of the relative error.

    Args:
        copies: seconds of each copy, by blocks.

    Raises:
        ConfigError: larger copies took no longer than small ones.
    """
    seconds = np.array([median(found) for found in copies.values()])
    size = np.array(list(copies), float) * block_bytes
    scale = size.max()
    rows = np.stack([np.ones_like(size), size / scale], axis=1) / seconds[:, None]
    (fixed, per_scale), _ = nnls(rows, np.ones_like(size))
    if not per_scale > 0:
        raise ConfigError("the KV copies took no longer the larger they were; measure again")
    return TransferModel(bytes_per_second=float(scale / per_scale), fixed_s=float(fixed))


def _token_bytes(region: KvRegion) -> int:
    """Of one token's K and V in all layers."""
    values = region.layers * region.kv_heads * (region.k_width + region.v_width)
    return int(values * WEIGHT_BYTES[region.dtype])
