"""Attention over the paged cache against a plain double-precision computation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from staffel.model.attention import Flavour, PackedStep
from staffel.model.attention_cpu import CpuAttention
from staffel.model.cache import PagedCache

LAYERS, LAYER = 3, 1


class Scene:
    """Sequences of random q, k and v, computed in a given split, with shuffled blocks."""

    def __init__(
        self, lengths: list[int], *, seed: int, block_size: int, heads: int, kv_heads: int,
        k_width: int, v_width: int,
    ) -> None:  # fmt: skip
        rng = torch.Generator().manual_seed(seed)
        self.lengths = lengths
        self.q = [torch.randn(n, heads, k_width, generator=rng) for n in lengths]
        self.k = [torch.randn(n, kv_heads, k_width, generator=rng) for n in lengths]
        self.v = [torch.randn(n, kv_heads, v_width, generator=rng) for n in lengths]
        self.sinks = torch.randn(heads, generator=rng)
        widest = -(-max(lengths) // block_size)
        blocks = torch.randperm(widest * len(lengths) + 2, generator=rng).numpy()
        self.tables = blocks[: widest * len(lengths)].reshape(len(lengths), widest)
        shape = (len(blocks), LAYERS, block_size, kv_heads)
        # What was never written must never be read.
        self.cache = PagedCache.over(
            torch.full((*shape, k_width), float("nan")), torch.full((*shape, v_width), float("nan"))
        )
        self.attention = CpuAttention(self.cache)

    def compute(self, spans: list[tuple[int, int, int]], how: Flavour) -> list[Tensor]:
        """One step: of sequence s the positions a to b; the outputs, one by one."""
        which, starts, stops = np.array(spans).T
        step = PackedStep(self.tables[which], starts, stops - starts)
        packed = [
            torch.cat([x[s][a:b] for s, a, b in spans]).contiguous()
            for x in (self.q, self.k, self.v)
        ]
        self.attention.begin(step)
        return list(self.attention.attend(LAYER, *packed, how).split((stops - starts).tolist()))

    def expected(self, sequence: int, how: Flavour) -> Tensor:
        """[length, heads, v_width] in float64, straight from the formula."""
        q, k, v = (x[sequence].double() for x in (self.q, self.k, self.v))
        shared = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(shared, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * how.scaling
        if how.softcap is not None:
            scores = how.softcap * torch.tanh(scores / how.softcap)
        age = torch.arange(len(q))[:, None] - torch.arange(len(q))[None]
        hidden = age < 0 if how.window is None else (age < 0) | (age >= how.window)
        weights = scores.masked_fill(hidden, float("-inf")).exp()
        total = weights.sum(-1, keepdim=True)
        if how.sinks is not None:
            total = total + how.sinks.double().exp().view(-1, 1, 1)
        return torch.einsum("hqk,khd->qhd", weights / total, v)


SHAPES = [
    {"block_size": 4, "heads": 4, "kv_heads": 2, "k_width": 8, "v_width": 8},
    {"block_size": 16, "heads": 3, "kv_heads": 3, "k_width": 16, "v_width": 10},
    {"block_size": 1, "heads": 6, "kv_heads": 1, "k_width": 4, "v_width": 12},
]
LENGTHS = [1, 5, 17, 40, 41, 150, 3, 64]


def split(lengths: list[int], seed: int) -> list[list[tuple[int, int, int]]]:
    """Steps that compute all positions: random chunks, single tokens among them, sequences in
    random order and not all in each step."""
    rng = np.random.default_rng(seed)
    done = [0] * len(lengths)
    steps = []
    while any(a < b for a, b in zip(done, lengths, strict=True)):
        spans = []
        for s in rng.permutation(len(lengths)):
            count = min(int(rng.choice([0, 1, 1, 1, 7, 33])), lengths[s] - done[s])
            if count:
                spans.append((int(s), done[s], done[s] + count))
                done[s] += count
        if spans:
            steps.append(spans)
    return steps


@pytest.mark.parametrize("window", [None, 1, 9])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_mixed_batches_equal_the_formula(
    number: int, window: int | None, softcap: float | None, sinks: bool
) -> None:
    scene = Scene(LENGTHS, seed=number, **SHAPES[number])
    how = Flavour(scaling=0.3, window=window, softcap=softcap, sinks=scene.sinks if sinks else None)
    expected = [scene.expected(s, how) for s in range(len(LENGTHS))]
    for spans in split(LENGTHS, number):
        for (s, a, b), out in zip(spans, scene.compute(spans, how), strict=True):
            torch.testing.assert_close(out.double(), expected[s][a:b], atol=1e-5, rtol=1e-4)


PLAIN = Flavour(scaling=0.3)


def test_a_row_sees_keys_that_another_row_of_the_batch_writes() -> None:
    scene = Scene([20, 20], seed=0, **SHAPES[0])
    for x in (scene.q, scene.k, scene.v):
        x[1] = x[0]
    scene.tables[1, :3] = scene.tables[0, :3]  # the first 12 tokens are shared
    late, early = scene.compute([(1, 12, 20), (0, 0, 12)], PLAIN)
    expected = scene.expected(0, PLAIN)
    torch.testing.assert_close(late.double(), expected[12:], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(early.double(), expected[:12], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("cache", ["k", "v"])
def test_each_used_block_counts(cache: str) -> None:
    scene = Scene([30], seed=1, **SHAPES[0])
    scene.compute([(0, 0, 29)], PLAIN)
    before = scene.compute([(0, 29, 30)], PLAIN)[0]
    blocks = getattr(scene.cache, cache).unflatten(0, (-1, LAYERS, 4))
    for block in scene.tables[0]:
        kept = blocks[block, LAYER].clone()
        blocks[block, LAYER] = kept.flip(-1) + 1
        assert not torch.allclose(scene.compute([(0, 29, 30)], PLAIN)[0], before, atol=1e-3)
        blocks[block, LAYER] = kept
    assert torch.equal(scene.compute([(0, 29, 30)], PLAIN)[0], before)


def test_layers_keep_apart() -> None:
    scene = Scene([9], seed=2, **SHAPES[0])
    scene.compute([(0, 0, 9)], PLAIN)
    rows = scene.cache.k.unflatten(0, (-1, LAYERS, 4))
    assert rows[:, LAYER].isfinite().any()
    assert rows[:, [0, 2]].isnan().all()
