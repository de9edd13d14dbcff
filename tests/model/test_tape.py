"""Recorded decode steps: the same numbers as the model's own, or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from staffel.kernels import elementwise, library, linear
from staffel.model import tape
from staffel.model.attention import PackedStep
from staffel.model.tape import Arena, Tapes, Unrecordable

VOCAB, WIDTH = 97, 24

needs_kernels = pytest.mark.skipif(library.level() is None, reason="the kernels are not built")


class Toy:
    """Instead of a model: an embedding, something done with it, and a product."""

    vocab_size = VOCAB

    def __init__(self, middle: Callable[[Tensor, Tensor], Tensor]) -> None:
        draw = torch.Generator().manual_seed(3)
        self._table = torch.randn(VOCAB, WIDTH, generator=draw)
        self._middle = middle
        self.passes = 0

    def logits(self, ids: Any, positions: Any, keep: Any) -> Tensor:
        self.passes += 1
        ids, positions, keep = (torch.as_tensor(x) for x in (ids, positions, keep))
        return (self._middle(self._table[ids], positions) @ self._table.T)[keep]


class Nothing:
    """Instead of attention."""

    def begin(self, step: PackedStep) -> None:
        pass


def recorded(toy: Toy, most: int = 3) -> Tapes:
    return Tapes(toy, Nothing(), most)  # type: ignore[arg-type]


def step_of(size: int, position: int) -> tuple[PackedStep, np.ndarray, list[int]]:
    each = np.ones(size, np.int64)
    step = PackedStep(np.zeros((size, 1), np.int64), position * each, each)
    return step, np.arange(size) + 10 * position, list(range(size))


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """Views, copies, an operation in place, and one with two results."""
    angles = positions[:, None].float() * torch.arange(WIDTH)
    best, where = x.topk(5, -1)
    x = torch.cat([x[:, ::2], x[:, 1::2]], -1) * angles.cos() + best.sum(-1, keepdim=True)
    x[:, 0].add_(where[:, 0])
    left, right = x.split(WIDTH // 2, -1)
    return torch.cat([right.contiguous(), left.contiguous()], -1) + x


def by_kernel(x: Tensor, positions: Tensor) -> Tensor:
    return elementwise.rms_norm(x + positions[:, None], torch.ones(WIDTH), 1e-6)


def by_number(x: Tensor, positions: Tensor) -> Tensor:
    return x * 2 if positions.max().item() > 1 else x


def by_mask(x: Tensor, positions: Tensor) -> Tensor:
    return x + x[x > 0].sum()


def by_chance(x: Tensor, positions: Tensor) -> Tensor:
    return x + torch.rand(())


class ByHistory:
    """Does something else each time, which no operation tells of."""

    def __init__(self) -> None:
        self._times = 0

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        self._times += 1
        return x * self._times


@pytest.mark.parametrize(
    "middle", [turned, pytest.param(by_kernel, marks=needs_kernels)], ids=["torch", "kernel"]
)
@torch.inference_mode()
def test_a_recorded_step_gives_what_the_model_gives(
    middle: Callable[[Tensor, Tensor], Tensor],
) -> None:
    toy = Toy(middle)
    tapes = recorded(toy)
    passes = toy.passes
    for size in (1, 2, 3, 2):
        for position in (0, 3, 7):
            step, ids, keep = step_of(size, position)
            ours = tapes.logits(step, ids, keep)
            assert ours is not None
            torch.testing.assert_close(ours.clone(), Toy(middle).logits(ids, step.positions, keep))
    assert toy.passes == passes  # nobody ran it


@pytest.mark.parametrize("middle", [by_number, by_mask, by_chance, ByHistory()])
def test_a_pass_that_decides_by_numbers_is_not_recorded(middle: Any) -> None:
    tapes = recorded(Toy(middle))
    assert len(tapes) == 0
    assert tapes.logits(*step_of(1, 0)) is None


def test_other_steps_are_not_on_tape() -> None:
    tapes = recorded(Toy(turned), most=2)
    step, ids, _ = step_of(2, 0)
    assert tapes.logits(step, ids, [1]) is None  # one of them only
    assert tapes.logits(*step_of(3, 0)) is None  # more sequences
    chunk = PackedStep(step.tables[:1], step.starts[:1], np.array([2]))
    assert tapes.logits(chunk, ids, [0, 1]) is None  # two tokens of one sequence


@needs_kernels
@torch.inference_mode()
def test_what_a_kernel_finds_wrong_is_said_again() -> None:
    packed = linear.pack(torch.ones(VOCAB, WIDTH))

    class Packed(Toy):
        def logits(self, ids: Any, positions: Any, keep: Any) -> Tensor:
            return linear.gather(packed, VOCAB, WIDTH, torch.as_tensor(ids))

    tapes = recorded(Packed(turned))
    step, ids, keep = step_of(2, 0)
    with pytest.raises(IndexError, match="outside the vocabulary"):
        tapes.logits(step, ids + VOCAB, keep)


# ---- memory


def test_places_that_are_freed_are_used_again() -> None:
    arena = Arena(1024)
    a, b = (arena.empty_like(torch.empty(50)) for _ in range(2))  # 256 bytes each
    first = a.data_ptr()
    view = a[3:]
    del a
    assert arena.empty_like(torch.empty(1)).data_ptr() == b.data_ptr() + 256
    del view
    assert arena.empty_like(torch.empty(1)).data_ptr() == first
    del b
    assert arena.empty_like(torch.empty(256)).data_ptr() == first  # all of it, in one piece


def test_a_full_arena_says_so() -> None:
    arena = Arena(128)
    kept = arena.empty_like(torch.empty(32))
    with pytest.raises(Unrecordable, match="128 bytes"):
        arena.empty_like(kept)


def test_a_place_is_the_same_memory_with_the_same_strides() -> None:
    arena = Arena(4096)
    given = torch.randn(4, 6).T[1:, ::2]
    placed = arena.empty_like(given).copy_(given)
    assert placed.stride() == given.stride()
    place = arena.at_its_place(placed)
    placed += 1
    assert torch.equal(place, given + 1)
    assert arena.at_its_place(given) is given


def test_slow_models_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape, "_SLOW", -1.0)
    assert len(recorded(Toy(turned))) == 0
