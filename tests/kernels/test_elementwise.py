"""Each kernel against the same formula in float64, on odd widths, strides and extreme values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from staffel.kernels import elementwise, library

pytestmark = pytest.mark.skipif(library.level() is None, reason="no kernels")

WIDTHS = [1, 3, 4, 7, 8, 15, 16, 17, 31, 64, 100, 576, 2049]
CLOSE = {"rtol": 2e-6, "atol": 1e-6}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(1)


def strided(rows: int, width: int, gap: int) -> Tensor:
    """Rows with `gap` other values between them, which are not to be touched or read."""
    whole = torch.full((rows, width + gap), torch.nan)
    whole[:, :width] = torch.randn(rows, width)
    return whole[:, :width]


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm(width: int, offset: float) -> None:
    x, weight = strided(5, width, 3), torch.randn(width)
    wide = x.double()
    expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    expected = expected * (weight.double() + offset)
    torch.testing.assert_close(
        elementwise.rms_norm(x, weight, 1e-5, offset).double(), expected, **CLOSE
    )


def test_rms_norm_of_zeros_is_zero() -> None:
    assert elementwise.rms_norm(torch.zeros(2, 20), torch.ones(20), 1e-6).eq(0).all()


ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("width", WIDTHS)
def test_gated(width: int, activation: elementwise.Activation) -> None:
    x = strided(5, 2 * width, 3) * 4
    gate, up = x.double().chunk(2, -1)
    expected = ACTIVATIONS[activation](gate) * up
    torch.testing.assert_close(elementwise.gated(x, activation).double(), expected, **CLOSE)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates_far_out(activation: elementwise.Activation) -> None:
    gate = torch.tensor([-1e30, -1e4, -100.0, -88.0, -0.0, 0.0, 88.0, 100.0, 1e4, 1e12])
    ours = elementwise.gated(torch.cat([gate, torch.ones(10)])[None], activation)[0]
    torch.testing.assert_close(ours, gate.clamp_min(0), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_nan_is_not_hidden(activation: elementwise.Activation) -> None:
    x = torch.zeros(1, 40)
    x[0, [3, 19]] = torch.nan  # within a vector, and in the tail
    assert elementwise.gated(x, activation)[0, [3, 19]].isnan().all()


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    size = cos.shape[-1]
    part, rest = x[..., :size], x[..., size:]
    other = torch.cat([-part[..., size // 2 :], part[..., : size // 2]], -1)
    return torch.cat([part * cos[:, None] + other * sin[:, None], rest], -1)


SIZES = [(2, 2), (8, 8), (24, 6), (64, 64), (80, 34), (128, 32)]


@pytest.mark.parametrize(("width", "size"), SIZES)
def test_rotary(width: int, size: int) -> None:
    tokens, heads = 5, 3
    x = strided(tokens, heads * (width + 4), 7).unflatten(1, (heads, -1))[..., :width]
    x = x.transpose(0, 1)[None]
    cos, sin = torch.randn(2, 1, tokens, size)
    expected = turned(x.double(), cos.double(), sin.double())
    ours = elementwise.rotary(x, cos, sin)
    assert ours.transpose(1, 2).is_contiguous()
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-6)


def test_threads_share_the_rows() -> None:
    x, weight = torch.randn(333, 512), torch.randn(512)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = elementwise.rms_norm(x, weight, 1e-6), elementwise.gated(x, "silu")
        torch.set_num_threads(2)
        shared = elementwise.rms_norm(x, weight, 1e-6), elementwise.gated(x, "silu")
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(alone, shared, strict=True))


@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows(rows: int) -> None:
    x = torch.randn(rows, 40)
    assert elementwise.rms_norm(x, torch.ones(40), 1e-6).shape == (rows, 40)
    assert elementwise.gated(x, "silu").shape == (rows, 20)
