"""Step times and KV capacities that DistServe's authors measured, as engines to plan with.

Source: the artifact of DistServe (Zhong et al., OSDI 2024; github.com/LLMServe/DistServe,
Apache-2.0): least-squares fits of step times on A100-80G, of the authors' own engine and of
vLLM 0.2.3. There are none for OPT-175B. Rounded to six digits.
"""

from __future__ import annotations

from typing import NamedTuple

from staffel.latency.model import FittedModel, Regime
from staffel.plan.candidates import Build, Engines, Parallel

Line = tuple[float, float, float]


class Coefficients(NamedTuple):
    """Of the whole model's step, in milliseconds."""

    prefill: Line
    """Constant, per prompt token, per squared prompt length."""
    decode: Line
    """Constant, per token of context, per sequence; up to 95 sequences."""
    decode_large: Line
    """The same, beyond 95."""


LARGEST_SMALL_BATCH = 95
STAGE_MS = 1.0
"""Added to prefill by the authors: so much for each pipeline stage, in every stage."""
SCHEDULE_MS, SCHEDULE_TOKEN_MS = 2.0, 0.0001
"""Their scheduling overhead: of a step, and of each token in it (prompt or context)."""

MEASURED = {
    ("distserve", "opt-13b", 1): Coefficients(
        (18.1025, 0.101912, 7.12226e-06),
        (19.9347, 0.000626936, 0.038507),
        (7.16619, 0.0005798, 0.158311),
    ),
    ("distserve", "opt-13b", 2): Coefficients(
        (14.743, 0.0685772, 2.44957e-06),
        (13.2948, 0.000341092, 0.0629639),
        (10.6387, 0.000311834, 0.0856291),
    ),
    ("distserve", "opt-13b", 4): Coefficients(
        (12.0623, 0.0380814, 5.22625e-07),
        (10.2562, 0.000187867, 0.0326927),
        (10.4835, 0.000171209, 0.0456665),
    ),
    ("distserve", "opt-66b", 2): Coefficients(
        (43.0588, 0.274229, 2.2478e-05),
        (48.288, 0.000942434, 0.12755),
        (28.7277, 0.000474485, 0.296178),
    ),
    ("distserve", "opt-66b", 3): Coefficients(
        (32.9982, 0.195683, 1.22052e-05),
        (35.8015, 0.0005845, 0.095267),
        (22.6539, 0.000535849, 0.208514),
    ),
    ("distserve", "opt-66b", 4): Coefficients(
        (29.4416, 0.151352, 8.31745e-06),
        (30.7603, 0.000451948, 0.0632842),
        (27.4708, 0.000404685, 0.124807),
    ),
    ("distserve", "opt-66b", 8): Coefficients(
        (25.4907, 0.106592, 3.39105e-06),
        (23.1551, 0.000226915, 0.0480064),
        (21.7177, 0.000375809, 0.0897861),
    ),
    ("vllm", "opt-13b", 1): Coefficients(
        (22.0522, 0.140509, 8.07658e-06),
        (23.475, 0.000592934, 0.0607269),
        (20.2064, 0.000490773, 0.120003),
    ),
    ("vllm", "opt-13b", 2): Coefficients(
        (27.4408, 0.0905453, 8.45205e-06),
        (24.5406, 0.000224401, 0.0871579),
        (17.9478, 0.000457085, 0.111791),
    ),
    ("vllm", "opt-13b", 4): Coefficients(
        (30.5363, 0.0515064, 4.23247e-07),
        (25.9011, 7.75363e-05, 0.0552809),
        (23.8839, 0.000284002, 0.0627652),
    ),
    ("vllm", "opt-66b", 2): Coefficients(
        (58.3822, 0.382641, -7.11415e-06),
        (57.0734, 0.00364611, 0.224937),
        (26.9838, 0.00620013, 0.448257),
    ),
    ("vllm", "opt-66b", 3): Coefficients(
        (45.7445, 0.277813, 3.64625e-05),
        (44.9396, 0.000809615, 0.21288),
        (43.696, 0.000840257, 0.240065),
    ),
    ("vllm", "opt-66b", 4): Coefficients(
        (42.9655, 0.212866, 4.60102e-05),
        (39.5818, 0.000694572, 0.135809),
        (40.8597, 0.000426487, 0.195084),
    ),
    ("vllm", "opt-66b", 8): Coefficients(
        (38.9312, 0.157368, 4.53168e-06),
        (31.176, 0.000275565, 0.067977),
        (29.0878, 0.000602772, 0.138961),
    ),
}
"""By engine, model, and tensor-parallel degree."""

KV_TOKENS = {
    "opt-13b": {
        (1, 1): 66144,
        (1, 2): 163008,
        (1, 4): 356752,
        (1, 5): 453616,
        (1, 8): 744224,
        (2, 1): 163008,
        (2, 2): 356752,
        (2, 4): 744224,
        (2, 5): 937968,
        (2, 8): 1519184,
        (4, 1): 356736,
        (4, 2): 744224,
        (4, 4): 1519168,
        (4, 5): 1906656,
        (4, 8): 3069088,
    },
    "opt-66b": {
        (2, 1): 11600,
        (2, 2): 78512,
        (2, 4): 212320,
        (2, 8): 479952,
        (3, 1): 45056,
        (3, 2): 145408,
        (3, 4): 346128,
        (3, 8): 747568,
        (4, 1): 78496,
        (4, 2): 212320,
        (4, 4): 479936,
        (4, 8): 1015200,
        (8, 1): 212304,
        (8, 2): 479936,
        (8, 4): 1015184,
        (8, 8): 2085696,
    },
}
"""Tokens of KV that fit, by model and (tp, pp)."""

KV_BYTES_PER_TOKEN = {"opt-13b": 819_200, "opt-66b": 2_359_296}
"""2 (K and V) x layers x hidden size x 2 bytes: 40 x 5120, and 64 x 9216."""


def engines(engine: str, model: str) -> Engines:
    """`engine`: distserve or vllm; `model`: opt-13b or opt-66b."""
    builds = {
        Parallel(tp, pp): Build(latency(MEASURED[engine, model, tp], pp), kv_tokens)
        for (tp, pp), kv_tokens in KV_TOKENS[model].items()
    }
    return Engines(model=model, kv_bytes_per_token=KV_BYTES_PER_TOKEN[model], builds=builds)


def latency(measured: Coefficients, pp: int) -> FittedModel:
    """Of the whole step through `pp` equal stages, with the authors' overheads.

    They measured no batches with prompts and decoding sequences together. For those this takes
    one constant, the larger one (weights are read once), and adds up the rest.
    """
    prefill = _prefill(measured.prefill, pp)
    small, large = _decode(measured.decode), _decode(measured.decode_large)
    return FittedModel(
        prefill=(prefill,),
        decode=(_up_to(small, LARGEST_SMALL_BATCH), large),
        mixed=(_mixed(prefill, small),),
    )


def _prefill(line: Line, pp: int) -> Regime:
    """A squared length is twice its (token, key) pairs less its tokens: n² = 2 n(n+1)/2 - n."""
    constant, token, squared = (value / 1e3 for value in line)
    return Regime(
        constant=constant + (STAGE_MS * pp * pp + SCHEDULE_MS) / 1e3,
        per_prompt_token=token - squared + SCHEDULE_TOKEN_MS / 1e3,
        per_prompt_pair=2 * squared,
    )


def _decode(line: Line) -> Regime:
    constant, context, sequence = (value / 1e3 for value in line)
    return Regime(
        constant=constant + SCHEDULE_MS / 1e3,
        per_decode=sequence,
        per_decode_context=context + SCHEDULE_TOKEN_MS / 1e3,
    )


def _up_to(regime: Regime, batch: int) -> Regime:
    return Regime(
        up_to=batch,
        constant=regime.constant,
        per_decode=regime.per_decode,
        per_decode_context=regime.per_decode_context,
    )


def _mixed(prefill: Regime, decode: Regime) -> Regime:
    return Regime(
        constant=max(prefill.constant, decode.constant),
        per_prompt_token=prefill.per_prompt_token,
        per_prompt_pair=prefill.per_prompt_pair,
        per_decode=decode.per_decode,
        per_decode_context=decode.per_decode_context,
    )
