"""One row's TTFT and TPOT: a closed loop of clients over step times from the GPU's sheet."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np
from silicon_loop import Engine, Load, Loop, Policy
from silicon_relay import steady_state
from silicon_rows import Row

from staffel.latency.hardware import hardware_named
from staffel.latency.model import Work
from staffel.latency.roofline import Efficiency, RooflineModel

POLICIES: dict[str, Policy] = {
    "trtllm": "whole",
    "vllm": "chunked",
    "sglang": "prefill-first",
}
RESERVED_OUTPUT = {"trtllm": 1.0, "vllm": 0.6, "sglang": 0.6}
"""TensorRT-LLM lets in what fits to its end; the others preempt, and hold somewhat more than the
mean of what is used."""
LEAST_LENGTH = {"public": 0.8, "other": 1.0}
USABLE_MEMORY = 0.9
ROUNDS = 3


class Factors(msgspec.Struct, frozen=True, kw_only=True):
    """What no sheet states, of one engine."""

    efficiency: Efficiency = Efficiency()
    fixed_s: float = 0.02
    """Before the first token: parsing, queueing and streaming around the steps."""
    prompt_token_s: float = 5e-6
    """The same, per prompt token."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """How one group of rows was run, which the rows don't tell."""

    budget: int
    first_round: float = 0.1
    """Share of the measured requests that were sent when all clients started at once."""
    slots_lost: int = 0
    answer_s: float = 0.0
    """Per output token, of one process that streams all answers, where that is a bottleneck."""


class Prediction(NamedTuple):
    """Means, in seconds."""

    ttft: float
    tpot: float


def predict(row: Row, factors: Factors, setup: Setup) -> Prediction:
    """Raises ConfigError where the model does not fit in the row's devices."""
    alone = _relay if row.mode == "disagg" else _colocated
    ttft, tpot = alone(row, factors, setup)
    around = factors.fixed_s + factors.prompt_token_s * row.prompt_tokens
    return Prediction(ttft + around, tpot)


def steady_tpot(row: Row, efficiency: Efficiency) -> float:
    """TPOT of a colocated row without the loop, hundreds of times faster: a full batch's decode
    step, and its share of all clients' prompts where these are computed beside it."""
    model = roofline(row, row.tp, Factors(efficiency=efficiency))
    share = (1 + LEAST_LENGTH[row.campaign]) / 2
    new, output = round(row.prompt_tokens * share), round(row.output_tokens * share)
    decode = Work.decode(row.clients, new + output // 2)
    step = model.step_seconds(decode)
    if POLICIES[row.backend] == "prefill-first":
        return step
    beside = Work(*(a + b for a, b in zip(decode, Work.prefill(new), strict=True)))
    return step + row.clients * (model.step_seconds(beside) - step) / output


def roofline(row: Row, tp: int, factors: Factors) -> RooflineModel:
    """The step times of one instance of `tp` devices."""
    return RooflineModel(
        hardware_named(row.hardware),
        row.shape,
        tp=tp,
        precision=row.precision,
        efficiency=factors.efficiency,
    )


def _colocated(row: Row, factors: Factors, setup: Setup) -> Prediction:
    model = roofline(row, row.tp, factors)
    engine = Engine(
        policy=POLICIES[row.backend],
        budget=setup.budget,
        slots_lost=setup.slots_lost,
        reserved_output=RESERVED_OUTPUT[row.backend],
        answer_s=setup.answer_s,
    )
    load = Load(
        clients=row.clients,
        prompt_tokens=row.prompt_tokens,
        output_tokens=row.output_tokens,
        least=LEAST_LENGTH[row.campaign],
        rounds=ROUNDS,
    )
    loop = Loop(model, engine, load, model.kv_tokens(usable=USABLE_MEMORY))
    times = np.array(loop.run())
    first, later = times[: row.clients].mean(axis=0), times[row.clients :].mean(axis=0)
    ttft = setup.first_round * first[0] + (1 - setup.first_round) * later[0]
    return Prediction(float(ttft), float(later[1]))


def _relay(row: Row, factors: Factors, setup: Setup) -> Prediction:
    prefill, decode = roofline(row, row.tp, factors), roofline(row, row.decode_tp, factors)
    for model in (prefill, decode):
        model.kv_tokens(usable=USABLE_MEMORY)
    share = (1 + LEAST_LENGTH[row.campaign]) / 2
    new, output = round(row.prompt_tokens * share), round(row.output_tokens * share)
    alone = prefill.step_seconds(Work.prefill(new))
    found = steady_state(
        row.clients,
        alone,
        row.prefill_workers,
        output,
        lambda count: decode.step_seconds(Work.decode(round(count), new + output // 2)),
        row.decode_workers,
    )
    together = alone * max(1.0, row.clients / row.prefill_workers / 2)
    ttft = setup.first_round * together + (1 - setup.first_round) * found.wait_and_prefill
    return Prediction(ttft, found.tpot)
