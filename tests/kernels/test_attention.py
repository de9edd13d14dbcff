"""Paged attention in C against the formula in float64, on shapes that reach every branch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from staffel.config import ConfigError
from staffel.kernels import library
from staffel.kernels.attention import MOST_ROWS
from staffel.model.attention import Flavour, PackedStep
from staffel.model.attention_kernels import KernelAttention
from staffel.model.cache import PagedCache

LAYERS, LAYER = 2, 1


@contextmanager
def use(level: str) -> Iterator[None]:
    """Let kernels that are looked up within be of that level; skip where it can't run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STAFFEL_KERNELS", level)
        _forget()
        try:
            library.level()
        except ConfigError as error:
            pytest.skip(str(error))
        yield
    _forget()


def _forget() -> None:
    library.level.cache_clear()
    library._library.cache_clear()


LEVELS = library.LEVELS


@pytest.fixture(autouse=True, params=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    with use(request.param):
        yield request.param


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    k_width: int
    v_width: int
    block_size: int


@dataclass(frozen=True)
class Batch:
    """Of each sequence `seen` keys are in the cache, and `count` tokens are computed."""

    seen: list[int]
    count: list[int]


class Scene:
    """Random keys and values, in a cache with shuffled blocks; NaN wherever nothing is."""

    def __init__(self, shape: Shape, batch: Batch, seed: int = 0) -> None:
        self.shape, self.batch = shape, batch
        rng = torch.Generator().manual_seed(seed)
        lengths = np.add(batch.seen, batch.count)
        wide = int(-(-lengths.max() // shape.block_size)) + 1
        blocks = torch.randperm(wide * len(lengths), generator=rng).numpy()
        self.step = PackedStep(
            blocks.reshape(len(lengths), wide), np.array(batch.seen), np.array(batch.count)
        )
        self.q, self.keys, self.values = (
            [torch.randn(int(n), heads, width, generator=rng) for n in lengths]
            for heads, width in (
                (shape.heads, shape.k_width),
                (shape.kv_heads, shape.k_width),
                (shape.kv_heads, shape.v_width),
            )
        )
        self.sinks = torch.randn(shape.heads, generator=rng)
        size = (len(blocks), LAYERS, shape.block_size, shape.kv_heads)
        self.cache = PagedCache.over(
            torch.full((*size, shape.k_width), float("nan")),
            torch.full((*size, shape.v_width), float("nan")),
        )
        self._fill()

    def _fill(self) -> None:
        for table, seen, k, v in zip(
            self.step.tables, self.batch.seen, self.keys, self.values, strict=True
        ):
            block, within = np.divmod(np.arange(seen), self.shape.block_size)
            self.cache.write(LAYER, self.cache.rows(table[block], within), k[:seen], v[:seen])

    def new(self, parts: list[Tensor]) -> Tensor:
        """[T, heads, width] of the tokens that are computed."""
        return torch.cat([x[n:] for x, n in zip(parts, self.batch.seen, strict=True)])

    def compute(self, how: Flavour) -> Tensor:
        return self.attend(how, *(self.new(x) for x in (self.q, self.keys, self.values)))

    def attend(self, how: Flavour, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attention = KernelAttention(self.cache)
        attention.begin(self.step)
        return attention.attend(LAYER, q, k, v, how)

    def expected(self, how: Flavour) -> Tensor:
        """[T, heads, v_width], float64."""
        parts = zip(self.q, self.keys, self.values, strict=True)
        return self.new([formula(*(x.double() for x in part), how) for part in parts])


def formula(q: Tensor, k: Tensor, v: Tensor, how: Flavour) -> Tensor:
    """Causal attention of one sequence from its first token on, in the tensors' precision."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * how.scaling
    if how.softcap is not None:
        scores = how.softcap * torch.tanh(scores / how.softcap)
    age = torch.arange(len(q))[:, None] - torch.arange(len(q))
    window = len(q) if how.window is None else how.window
    scores = scores.masked_fill((age < 0) | (age >= window), float("-inf"))
    sinks = torch.full((q.shape[1],), float("-inf")) if how.sinks is None else how.sinks
    scores = torch.cat([scores, sinks.to(scores).view(-1, 1, 1).expand(-1, len(q), 1)], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :-1], v)


def check(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected, atol=4e-6, rtol=1e-5)


PLAIN = Flavour(scaling=0.2)
SMALL = Shape(heads=6, kv_heads=2, k_width=64, v_width=64, block_size=16)
MIXED = Batch(seen=[0, 70, 63, 0, 300, 127], count=[130, 1, 1, 1, 9, 65])

SHAPES = [
    SMALL,
    replace(SMALL, heads=2, block_size=1),
    replace(SMALL, heads=34, k_width=24, v_width=12, block_size=5),
    replace(SMALL, heads=10, kv_heads=5, k_width=80, v_width=128, block_size=64),
    replace(SMALL, heads=1, kv_heads=1, k_width=1, v_width=3, block_size=100),
    replace(SMALL, heads=3, kv_heads=3, k_width=192, v_width=100, block_size=7),
    replace(SMALL, heads=130, kv_heads=1, k_width=17, v_width=33),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prefill_and_decode_in_one_batch(shape: Shape) -> None:
    scene = Scene(shape, MIXED)
    check(scene.compute(PLAIN), scene.expected(PLAIN))


@pytest.mark.parametrize("window", [None, 1, 40, 64, 65, 200])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_windows_soft_caps_and_sinks(
    window: int | None, softcap: float | None, sinks: bool
) -> None:
    scene = Scene(SMALL, MIXED, seed=1)
    how = Flavour(scaling=0.3, window=window, softcap=softcap, sinks=scene.sinks if sinks else None)
    check(scene.compute(how), scene.expected(how))


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 6, 15, 16, 17, 42, 43])
def test_chunks_of_any_length(tokens: int) -> None:
    scene = Scene(SMALL, Batch([0, 1, 47, 200], [tokens] * 4), seed=tokens)
    check(scene.compute(PLAIN), scene.expected(PLAIN))


def test_heads_first_and_fused_inputs() -> None:
    """The views that models give: of [heads, T, width], and of q, k, v in one matrix."""
    scene = Scene(SMALL, MIXED)
    expected = scene.expected(PLAIN)
    q, k, v = (scene.new(x) for x in (scene.q, scene.keys, scene.values))
    turned = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    check(scene.attend(PLAIN, *turned), expected)
    fused = torch.cat([x.flatten(1) for x in (q, k, v)], 1)
    parts = fused.split([x[0].numel() for x in (q, k, v)], 1)
    views = [part.unflatten(1, x.shape[1:]) for part, x in zip(parts, (q, k, v), strict=True)]
    check(scene.attend(PLAIN, *views), expected)
    across = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    check(scene.attend(PLAIN, *across), expected)


def test_the_cache_holds_the_new_keys_and_values() -> None:
    scene = Scene(SMALL, MIXED)
    scene.compute(PLAIN)
    rows = scene.step.tables[scene.step.owners, scene.step.positions // SMALL.block_size]
    rows = scene.cache.rows(rows, scene.step.positions % SMALL.block_size)
    rows = rows + LAYER * SMALL.block_size
    assert torch.equal(scene.cache.k[rows], scene.new(scene.keys))
    assert torch.equal(scene.cache.v[rows], scene.new(scene.values))


@pytest.mark.parametrize("scale", [0.0, 1e-3, 60.0])
def test_flat_and_steep_scores(scale: float) -> None:
    """Steep ones: all but the largest vanish, and rows forget what they summed before."""
    scene = Scene(SMALL, MIXED, seed=2)
    how = Flavour(scaling=scale)
    difference = (scene.compute(how).double() - scene.expected(how)).abs().max()
    # Scores of some hundreds carry a rounding error that the exponential makes relative.
    assert difference < 4e-6 + 2e-5 * scale


@pytest.mark.parametrize("cap", [0.01, 1.0, 50.0])
def test_soft_caps_from_linear_to_saturated(cap: float) -> None:
    scene = Scene(SMALL, MIXED, seed=3)
    how = Flavour(scaling=1.0, softcap=cap)
    torch.testing.assert_close(scene.compute(how).double(), scene.expected(how), atol=2e-5, rtol=0)


def test_a_nan_stays_visible() -> None:
    scene = Scene(SMALL, Batch([20, 20], [1, 40]))
    q, k, v = (scene.new(x) for x in (scene.q, scene.keys, scene.values))
    q[0, 0, 0] = q[7, 1, 3] = float("nan")
    out = scene.attend(PLAIN, q, k, v)
    assert out[0, 0].isnan().all()
    assert out[7, 1].isnan().all()
    assert out[1:7].isfinite().all()


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("batch", [MIXED, Batch([500], [1])], ids=["mixed", "one row"])
def test_threads_change_nothing(threads: int, batch: Batch) -> None:
    scene = Scene(SMALL, batch)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = scene.compute(PLAIN)
        torch.set_num_threads(threads)
        assert torch.equal(scene.compute(PLAIN), alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("table", [[3, 99, 0], [3, -1, 0]])
def test_a_block_that_is_not_there_is_refused(table: list[int]) -> None:
    attention = KernelAttention(PagedCache.over(*torch.zeros(2, 4, 1, 16, 1, 8)))
    with pytest.raises(ValueError, match="sequence 1"):
        attention.begin(
            PackedStep(np.array([[0, 1, 99], table]), np.array([3, 30]), np.array([2, 2]))
        )


def test_a_table_that_is_too_short_is_refused() -> None:
    attention = KernelAttention(PagedCache.over(*torch.zeros(2, 4, 1, 16, 1, 8)))
    with pytest.raises(ValueError, match="sequence 0"):
        attention.begin(PackedStep(np.array([[0, 1]]), np.array([31]), np.array([2])))


def test_tiles_cover_each_token_once() -> None:
    counts = np.array([1, 100, 42, 43])
    group = 3
    step = PackedStep(np.zeros((4, 7), np.int64), np.zeros(4, np.int64), counts)
    table = step.tiles(MOST_ROWS // group)
    rows = table[:, 2].max() * group
    assert rows == 126
    covered = [(s, first + i) for s, first, tokens in table for i in range(tokens)]
    assert covered == [(s, i) for s, count in enumerate(counts) for i in range(count)]
