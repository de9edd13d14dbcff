"""Step times from sheets keep to the bounds that the sheets set, and move the right way."""

from __future__ import annotations

import msgspec
import pytest

from staffel.config import ConfigError
from staffel.latency.hardware import SHEETS, hardware_named
from staffel.latency.model import Work, pairs
from staffel.latency.roofline import Efficiency, Precision, RooflineModel, fewest_devices
from staffel.latency.shape import ModelShape, shape_of

IDEAL = Efficiency(
    compute=1,
    narrow_compute=1,
    experts=1,
    attention=1,
    memory=1,
    link=1,
    collective_s=0,
    layer_s=0,
    expert_layer_s=0,
    qk_norm_s=0,
    eager_layer_s=0,
    eager_expert_layer_s=0,
    step_s=0,
    token_bytes=0,
)
A100 = hardware_named("a100-80g")


def seconds(work: Work, *, model: str = "opt-13b", tp: int = 1, pp: int = 1) -> float:
    latency = RooflineModel(A100, shape_of(model), tp=tp, pp=pp, efficiency=IDEAL)
    return latency.step_seconds(work)


def test_one_decode_is_the_reading_of_the_weights_and_the_context() -> None:
    shape = shape_of("opt-13b")
    size = 2 * shape.active_weights(1) + 512 * shape.kv_bytes_per_token()
    assert seconds(Work.decode(1, 512)) == pytest.approx(size / A100.memory_bytes_per_second)


def test_a_long_prompt_is_its_arithmetic() -> None:
    shape = shape_of("opt-13b")
    products = 2 * shape.dense_weights * 2048
    attention = 2 * pairs(2048) * 2 * shape.hidden * shape.layers
    head = 2 * shape.head_weights / A100.memory_bytes_per_second
    expected = (products + attention) / A100.flops["bfloat16"] + head
    assert seconds(Work.prefill(2048)) == pytest.approx(expected)


def test_chunks_cost_the_attention_of_the_whole_prompt() -> None:
    assert pairs(100, 0) + pairs(100, 100) == pairs(200)


def test_a_decode_beside_a_prompt_costs_more_than_either_but_less_than_both() -> None:
    prompt, decodes = Work.prefill(1024), Work.decode(32, 512)
    both = Work(*(a + b for a, b in zip(prompt, decodes, strict=True)))
    assert seconds(prompt) < seconds(both) < seconds(prompt) + seconds(decodes)


def test_tensor_parallel_shortens_a_step_and_pipeline_stages_do_not() -> None:
    work = Work.prefill(1024)
    assert seconds(work) / 4 < seconds(work, tp=4) < seconds(work) / 2
    assert seconds(work, pp=4) >= seconds(work)


def test_a_short_prompt_waits_for_the_host_and_a_decode_does_not() -> None:
    def latency(eager: float) -> RooflineModel:
        efficiency = msgspec.structs.replace(IDEAL, eager_layer_s=eager)
        return RooflineModel(A100, shape_of("opt-13b"), efficiency=efficiency)

    short, long, decode = Work.prefill(8), Work.prefill(8192), Work.decode(8, 8)
    assert latency(1e-3).step_seconds(short) == pytest.approx(40e-3)
    assert latency(1e-3).step_seconds(long) == latency(0).step_seconds(long)
    assert latency(1e-3).step_seconds(decode) == latency(0).step_seconds(decode)


def test_sliding_windows_bound_what_a_token_sees() -> None:
    shape = shape_of("llama-3.1-8b")
    config = {name: getattr(shape, name) for name in shape.__struct_fields__}
    windowed = ModelShape(**{**config, "window": 128, "window_layers": shape.layers})
    full = RooflineModel(A100, shape, efficiency=IDEAL)
    narrow = RooflineModel(A100, windowed, efficiency=IDEAL)
    short, long = Work.decode(8, 100), Work.decode(8, 8000)
    assert narrow.step_seconds(short) == full.step_seconds(short)
    assert narrow.step_seconds(long) == narrow.step_seconds(Work.decode(8, 128))


def test_kv_that_fits_is_near_what_was_measured() -> None:
    # LLMServe/DistServe's profile of OPT on A100-80G: 66,144 and 78,496 tokens
    assert RooflineModel(A100, shape_of("opt-13b")).kv_tokens() == pytest.approx(66144, rel=0.1)
    assert RooflineModel(A100, shape_of("opt-66b"), tp=4).kv_tokens() == pytest.approx(
        78496, rel=0.25
    )


def test_kv_heads_are_copied_where_devices_outnumber_them() -> None:
    shape = shape_of("llama-3.1-8b")
    eight, sixteen = (RooflineModel(A100, shape, tp=tp).kv_tokens() for tp in (8, 16))
    assert sixteen < 1.1 * eight


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="do not fit"):
        RooflineModel(A100, shape_of("opt-66b")).kv_tokens()
    with pytest.raises(ConfigError, match="does not divide"):
        RooflineModel(A100, shape_of("opt-66b"), tp=5)
    assert fewest_devices(A100, shape_of("opt-66b")) == 2
    assert fewest_devices(A100, shape_of("opt-175b")) == 8


def test_four_bit_weights_multiply_in_what_the_device_has() -> None:
    assert A100.peak("fp4") == A100.flops["bfloat16"]
    assert hardware_named("H100").peak("fp4") == SHEETS["h100"].flops["fp8"]
    assert hardware_named("b200").peak("int4") == SHEETS["b200"].flops["bfloat16"]


def test_quantised_weights_are_read_faster() -> None:
    def step(dtype: str) -> float:
        precision = Precision(dtype, dtype)
        return RooflineModel(
            hardware_named("h100"), shape_of("llama-3.1-8b"), precision=precision, efficiency=IDEAL
        ).step_seconds(Work.decode(1, 16))

    assert 0.5 < step("fp8") / step("bfloat16") < 0.6  # the output projection stays as it is


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="a100-80g"):
        hardware_named("tpu")
    with pytest.raises(ConfigError, match="fp3"):
        RooflineModel(A100, shape_of("opt-13b"), precision=Precision("fp3"))
