"""What a transformer does between its matrix products, each as one kernel on a GPU, in Triton.

The same functions as `staffel.kernels.elementwise` has for CPUs, in float32, bfloat16 or float16.
They compute in float32 and round once. Inputs may have strides between rows, never within one;
outputs are contiguous.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from staffel.kernels.elementwise import Activation

_WIDTH = 1024
"""Values of a gated row that a program computes."""


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x / sqrt(mean(x²) + eps) * (weight + offset), over rows: [T, d] for x [T, d], weight [d].

    Root mean square layer normalization (Zhang and Sennrich, 2019).
    """
    rows, width = x.shape
    out = x.new_empty(rows, width)
    _rms_norm[(rows,)](
        x, weight, out, x.stride(0), eps, offset, WIDTH=width, PAD=triton.next_power_of_2(width)
    )
    return out


def gated(x: Tensor, activation: Activation) -> Tensor:
    """activation(gate) * up: [T, m] for rows of m gates and then m ups, x [T, 2 m].

    Gated linear units (Shazeer, GLU Variants Improve Transformer, 2020).
    """
    rows, width = x.shape[0], x.shape[1] // 2
    out = x.new_empty(rows, width)
    _gated[(rows, triton.cdiv(width, _WIDTH))](
        x, out, x.stride(0), width, TANH=activation == "gelu_tanh", PART=_WIDTH
    )
    return out


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The first R values of each head turned, in two halves: for x [1, heads, T, d], the same.

    cos and sin are contiguous, [1, T, R], R even and at most d. What comes out lies token by
    token. Rotary position embedding (Su et al., RoFormer, 2021), with the pairs as GPT-NeoX has
    them: i and i + R / 2.
    """
    _, heads, tokens, width = x.shape
    _, head_stride, token_stride, _ = x.stride()
    out = x.new_empty_strided(x.shape, (x.numel(), width, heads * width, 1))
    turned = cos.shape[2]
    _rotary[(tokens,)](
        x, cos, sin, out, head_stride, token_stride,
        HEADS=heads, WIDTH=width, TURNED=turned,
        HEADS_PAD=triton.next_power_of_2(heads), PAD=triton.next_power_of_2(width),
    )  # fmt: skip
    return out


@triton.jit
def _rms_norm(x, weight, out, stride, eps, offset, WIDTH: tl.constexpr, PAD: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, PAD)
    real = i < WIDTH
    values = tl.load(x + row * stride + i, mask=real, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values) / WIDTH + eps)
    factor = tl.load(weight + i, mask=real, other=0.0).to(tl.float32) + offset
    tl.store(out + row * WIDTH + i, (values * scale * factor).to(out.dtype.element_ty), mask=real)


@triton.jit
def _gated(x, out, stride, width, TANH: tl.constexpr, PART: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * PART + tl.arange(0, PART)
    real = i < width
    gate = tl.load(x + row * stride + i, mask=real, other=0.0).to(tl.float32)
    up = tl.load(x + row * stride + width + i, mask=real, other=0.0).to(tl.float32)
    if TANH:
        # tanh x = 2 sigmoid(2 x) - 1; 0.7979 is the square root of 2 / pi
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        gate = gate * tl.sigmoid(2 * inner)
    else:
        gate = gate * tl.sigmoid(gate)
    tl.store(out + row * width + i, (gate * up).to(out.dtype.element_ty), mask=real)


@triton.jit
def _rotary(
    x, cos, sin, out, head_stride, token_stride,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, TURNED: tl.constexpr,
    HEADS_PAD: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """One token, all heads."""
    token = tl.program_id(0).to(tl.int64)
    head, i = tl.arange(0, HEADS_PAD)[:, None], tl.arange(0, PAD)[None, :]
    real = (head < HEADS) & (i < WIDTH)
    turns = i < TURNED
    half: tl.constexpr = TURNED // 2
    row = x + token * token_stride + head * head_stride
    values = tl.load(row + i, mask=real, other=0.0).to(tl.float32)
    other = tl.where(i < half, i + half, i - half)
    partner = tl.load(row + other, mask=real & turns, other=0.0).to(tl.float32)
    partner = tl.where(i < half, -partner, partner)
    c = tl.load(cos + token * TURNED + i, mask=turns, other=1.0).to(tl.float32)
    s = tl.load(sin + token * TURNED + i, mask=turns, other=0.0).to(tl.float32)
    place = out + (token * HEADS + head) * WIDTH + i
    tl.store(place, (values * c + partner * s).to(out.dtype.element_ty), mask=real)
