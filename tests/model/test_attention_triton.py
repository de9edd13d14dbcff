"""Attention in Triton passes the tests of attention by torch, under Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with torch's CUDA builds")

from staffel.model import attention_triton
from staffel.model.attention import Flavour, PackedStep
from staffel.model.attention_triton import TritonAttention
from staffel.model.cache import PagedCache
from tests.model import test_attention
from tests.model.test_attention import (  # noqa: F401
    SHAPES,
    Scene,
    test_a_row_sees_keys_that_another_row_of_the_batch_writes,
    test_each_used_block_counts,
    test_layers_keep_apart,
)

LENGTHS = [1, 5, 40, 150]


@pytest.fixture(autouse=True)
def in_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_attention, "CpuAttention", TritonAttention)


@pytest.mark.parametrize("number", range(len(SHAPES)))
@pytest.mark.parametrize(
    ("window", "softcap", "sinks"),
    [(None, None, False), (9, None, False), (None, 2.0, False), (None, None, True), (1, 2.0, True)],
)
def test_chunks_and_decodes_equal_the_formula(
    number: int, window: int | None, softcap: float | None, sinks: bool
) -> None:
    scene = Scene(LENGTHS, seed=number, **SHAPES[number])
    how = Flavour(scaling=0.3, window=window, softcap=softcap, sinks=scene.sinks if sinks else None)
    steps = [
        [(0, 0, 1), (2, 0, 33), (3, 0, 100)],  # prompts
        [(1, 0, 4), (2, 33, 39), (3, 100, 148)],  # chunks against what is there
        [(1, 4, 5), (2, 39, 40), (3, 148, 149)],  # tokens of each: keys are split into parts
        [(3, 149, 150)],
    ]
    for spans in steps:
        for (s, a, b), out in zip(spans, scene.compute(spans, how), strict=True):
            expected = scene.expected(s, how)[a:b]
            torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("parts", [1, 2, 16])
def test_a_decode_is_the_same_in_any_number_of_parts(
    parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene([150], seed=4, **SHAPES[0])
    how = Flavour(scaling=0.3)
    scene.compute([(0, 0, 149)], how)
    monkeypatch.setattr(attention_triton, "_parts", lambda programs: parts)
    (out,) = scene.compute([(0, 149, 150)], how)
    torch.testing.assert_close(out.double(), scene.expected(0, how)[149:], atol=1e-5, rtol=1e-4)


def test_half_width_is_summed_in_float32() -> None:
    """float16: the interpreter has no products of bfloat16."""
    scene = Scene([100], seed=5, **SHAPES[0])
    for name in ("q", "k", "v"):
        setattr(scene, name, [x.half() for x in getattr(scene, name)])
    cache = scene.cache
    scene.attention = TritonAttention(
        PagedCache(cache.k.half(), cache.v.half(), cache.layers, cache.block_size)
    )
    how = Flavour(scaling=0.3)
    (out,) = scene.compute([(0, 0, 100)], how)
    assert out.dtype == torch.float16
    torch.testing.assert_close(out.double(), scene.expected(0, how), atol=2e-3, rtol=2e-3)


def test_a_step_at_fixed_places_filled_up_with_nothing() -> None:
    """Two sequences in places for four: the other two rows touch the spare block alone."""
    scene = Scene([30, 9], seed=6, **SHAPES[0])
    how = Flavour(scaling=0.3)
    scene.compute([(0, 0, 29), (1, 0, 8)], how)
    spare = int(max(set(range(len(scene.cache.k) // 12)) - set(scene.tables.flatten().tolist())))
    places = attention_triton.Places(scene.cache, 4, blocks=20, spare=spare)
    step = PackedStep(scene.tables, np.array([29, 8]), np.array([1, 1]))
    packed = [
        torch.cat([x[0][29:], x[1][8:], torch.ones_like(x[0][:2])])
        for x in (scene.q, scene.k, scene.v)
    ]
    before = scene.cache.k.clone()
    for _ in range(2):  # they are filled anew each time
        scene.attention.begin_in_place(step, places)
        out = scene.attention.attend(test_attention.LAYER, *packed, how)
    for row, (sequence, at) in enumerate([(0, 29), (1, 8)]):
        expected = scene.expected(sequence, how)[at]
        torch.testing.assert_close(out[row].double(), expected, atol=1e-5, rtol=1e-4)
    changed = (before != scene.cache.k).any(-1).any(-1) & ~before.isnan().all(-1).all(-1)
    assert not changed.any()  # nothing that was there before
    written = before.isnan().all(-1).all(-1) & ~scene.cache.k.isnan().any(-1).any(-1)
    assert int(written.sum()) == 3  # a token of each sequence, and one row of the spare block


def test_enough_programs_for_a_gpu_and_no_more() -> None:
    assert [attention_triton._parts(n) for n in (1, 8, 64, 512, 4096)] == [16, 16, 8, 1, 1]
    step = PackedStep(np.zeros((3, 2), np.int64), np.zeros(3, np.int64), np.array([1, 5, 4]))
    assert step.tiles(4).tolist() == [[0, 0, 1], [1, 0, 4], [1, 4, 1], [2, 0, 4]]
