"""What no schedule can beat, from the latency model alone: cheap reasons to skip a candidate."""

from __future__ import annotations

import math
from collections.abc import Sequence

from staffel.bench.workload import Lengths
from staffel.config import SLO
from staffel.latency.model import LatencyModel, Work
from staffel.plan.candidates import Build

SATURATED = 0.9
"""Share of the best speed at which a prefill batch counts as saturating."""
LARGEST_CHUNK = 4096
SMALLEST_CHUNK = 64


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def added(one: Work, other: Work) -> Work:
    """Both in one batch."""
    return Work(*(a + b for a, b in zip(one, other, strict=True)))


def saturating_tokens(latency: LatencyModel) -> int:
    """The smallest power of two of prompt tokens that keeps the device as good as busy.

    Larger batches only make prompts wait for each other (DistServe, OSDI 2024, section 3.1).
    """
    sizes = _powers(SMALLEST_CHUNK, LARGEST_CHUNK)
    # Short prompts: how long they are isn't what fills the device.
    speeds = [
        n / latency.step_seconds(Work.prefill(SMALLEST_CHUNK, 0, n // SMALLEST_CHUNK))
        for n in sizes
    ]
    best = max(speeds)
    return next(n for n, speed in zip(sizes, speeds, strict=True) if speed >= SATURATED * best)


def _powers(start: int, end: int) -> list[int]:
    sizes = [start]
    while sizes[-1] < end:
        sizes.append(2 * sizes[-1])
    return sizes


def prefill_limit(build: Build, pp: int, lengths: Sequence[Lengths]) -> float:
    """Requests per second whose prompts can be computed: batched as well as can be, never idle."""
    prompt = round(mean([each.prompt_tokens for each in lengths]))
    seconds = (
        build.latency.step_seconds(Work.prefill(prompt, 0, n)) / n for n in (1, 2, 4, 8, 16, 32)
    )
    return pp / min(seconds)


def decode_limit(build: Build, pp: int, lengths: Sequence[Lengths], tpot: float | None) -> float:
    """Requests per second whose tokens can be computed, in the largest batch that memory and, for
    the mean, the bound on the time per token allow."""
    outputs = mean([each.output_tokens - 1 for each in lengths])
    context = round(mean([each.prompt_tokens + each.output_tokens / 2 for each in lengths]))
    if outputs <= 0:
        return float("inf")
    largest = max(1, build.kv_tokens // context)
    rates = [
        batch * pp / build.latency.step_seconds(Work.decode(batch, context)) / outputs
        for batch in _batches(largest // pp)
        if tpot is None or build.latency.step_seconds(Work.decode(batch, context)) <= tpot
    ]
    return max(rates, default=0.0)


def colocated_limit(build: Build, pp: int, lengths: Sequence[Lengths], tpot: float | None) -> float:
    """Requests per second whose prompts and tokens can be computed in the same steps.

    In a steady state, a step with B decoding sequences computes B P / O prompt tokens: as many as
    the requests bring whose tokens it computes (P prompt tokens and O decoded ones each).
    """
    prompt = mean([each.prompt_tokens for each in lengths])
    outputs = mean([each.output_tokens - 1 for each in lengths])
    if outputs <= 0:
        return prefill_limit(build, pp, lengths)
    context = round(mean([each.prompt_tokens + each.output_tokens / 2 for each in lengths]))
    rates = []
    for batch in _batches(max(1, build.kv_tokens // context // pp)):
        prompts = batch / outputs
        tokens, pairs = prompts * prompt, prompts * prompt * (prompt + 1) / 2
        work = Work(round(tokens), round(pairs), math.ceil(prompts), batch, batch * context)
        seconds = build.latency.step_seconds(work)
        if tpot is None or seconds <= tpot:
            rates.append(pp * batch / outputs / seconds)
    return max(rates, default=0.0)


def _batches(largest: int) -> list[int]:
    """Up to `largest`, in steps of about a tenth."""
    sizes = [1]
    while sizes[-1] < largest:
        sizes.append(min(largest, max(sizes[-1] + 1, round(1.1 * sizes[-1]))))
    return sizes


def prefill_feasible(build: Build, lengths: Sequence[Lengths], slo: SLO, attainment: float) -> bool:
    """Whether enough prompts make the TTFT bound on an idle instance, and fit its memory."""
    fit = [each for each in lengths if each.prompt_tokens <= build.kv_tokens]
    if slo.ttft is not None:
        fit = [each for each in fit if _prompt_seconds(build.latency, each) <= slo.ttft]
    return len(fit) >= attainment * len(lengths)


def _prompt_seconds(latency: LatencyModel, lengths: Lengths) -> float:
    return latency.step_seconds(Work.prefill(lengths.prompt_tokens))


def decode_feasible(build: Build, lengths: Sequence[Lengths], slo: SLO, attainment: float) -> bool:
    """Whether enough requests make the TPOT bound on an idle instance, and fit its memory."""
    fit = [
        each
        for each in lengths
        if each.prompt_tokens + each.output_tokens <= build.kv_tokens
        and (slo.tpot is None or _token_seconds(build.latency, each) <= slo.tpot)
    ]
    return len(fit) >= attainment * len(lengths)


def _token_seconds(latency: LatencyModel, lengths: Lengths) -> float:
    if lengths.output_tokens < 2:
        return 0.0
    context = lengths.prompt_tokens + lengths.output_tokens // 2
    return latency.step_seconds(Work.decode(1, context))
