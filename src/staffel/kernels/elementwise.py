"""What a transformer does between its matrix products, each in one pass: float32, on a CPU.

Inputs may have strides between rows, never within one; outputs are contiguous.
"""

from __future__ import annotations

from ctypes import c_float, c_int, c_int64, c_void_p
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from staffel.kernels import library

Activation = Literal["silu", "gelu_tanh"]

_SHARED = 1 << 16
"""Values from which on a call is worth several threads: waking them takes some microseconds."""


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x / sqrt(mean(x²) + eps) * (weight + offset), over rows: [T, d] for x [T, d], weight [d].

    Root mean square layer normalization (Zhang and Sennrich, 2019).
    """
    rows, width = x.shape
    out = x.new_empty(rows, width)
    _rms_norm()(
        x.data_ptr(), x.stride(0), weight.data_ptr(), out.data_ptr(),
        rows, width, eps, offset, _threads(rows * width),
    )  # fmt: skip
    return out


def gated(x: Tensor, activation: Activation) -> Tensor:
    """activation(gate) * up: [T, m] for rows of m gates and then m ups, x [T, 2 m].

    Gated linear units (Shazeer, GLU Variants Improve Transformer, 2020).
    """
    rows, width = x.shape[0], x.shape[1] // 2
    out = x.new_empty(rows, width)
    _gated()(
        x.data_ptr(), x.stride(0), out.data_ptr(),
        rows, width, activation == "gelu_tanh", _threads(rows * width),
    )  # fmt: skip
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
    _rotary()(
        x.data_ptr(), head_stride, token_stride, out.data_ptr(),
        heads, tokens, width, cos.data_ptr(), sin.data_ptr(), cos.shape[2],
    )  # fmt: skip
    return out


def _threads(values: int) -> int:
    return torch.get_num_threads() if values >= _SHARED else 1


# Looked up at the first call, not at import: there may be no library.


@cache
def _rms_norm() -> Any:
    return library.function(
        "staffel_rms_norm", c_void_p, c_int64, c_void_p, c_void_p,
        c_int64, c_int64, c_float, c_float, c_int,
    )  # fmt: skip


@cache
def _gated() -> Any:
    return library.function(
        "staffel_gated", c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int, c_int
    )


@cache
def _rotary() -> Any:
    return library.function(
        "staffel_rotary", c_void_p, c_int64, c_int64, c_void_p,
        c_int64, c_int64, c_int64, c_void_p, c_void_p, c_int64,
    )  # fmt: skip
