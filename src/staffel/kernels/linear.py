"""Linear layers over packed weights, fp32 and int8 (source/linear.c, source/linear_int8.c).

A weight [n, k] is packed once, into panels of 48 outputs: fp32 as [ceil(n / 48)][k][48], int8 as
[ceil(n / 48)][ceil(k / 4)][48][4], the rest filled with zeros. Packed tensors whose n is a multiple
of `PANEL` can be concatenated. All tensors are on the CPU.
"""

from __future__ import annotations

from ctypes import c_int, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from staffel.config import ConfigError
from staffel.kernels import library

PANEL = 48
QUAD = 4
LARGEST = 127
DEEPEST_INT8 = 65_536  # of k: 127 · 127 · k stays within int32

_BLOCK_ROWS = 64  # that source/linear_int8.c rounds at a time
_SHARED = 1 << 16  # weights from which on a call is worth waking several threads
_IDS = (c_void_p, c_int64)


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A weight [n, k] as symmetric int8: row j of it is `scales[j]` times small integers."""

    packed: Tensor
    scales: Tensor
    n: int
    k: int


def packed_numel(n: int, k: int) -> int:
    """Elements of a packed fp32 weight [n, k]."""
    return _panels(n) * PANEL * k


def packed_numel_int8(n: int, k: int) -> int:
    """Elements (bytes) of a packed int8 weight [n, k]."""
    return packed_numel(n, _up(k, QUAD))


def pack(weight: Tensor, out: Tensor | None = None) -> Tensor:
    """The panels of a weight [n, k] in fp32, flat; into `out` if given, which must be contiguous.

    Raises:
        ConfigError: `out` is not a contiguous fp32 tensor of `packed_numel(n, k)` elements.
    """
    n, k = weight.shape
    packed = _room(out, packed_numel(n, k), torch.float32)
    panels = packed.view(-1, k, PANEL)
    whole, rest = divmod(n, PANEL)
    panels[:whole] = weight[: whole * PANEL].view(whole, PANEL, k).transpose(1, 2)
    if rest:
        panels[whole].zero_()[:, :rest] = weight[whole * PANEL :].T
    return packed


def linear(x: Tensor, packed: Tensor, n: int, bias: Tensor | None = None) -> Tensor:
    """x [T, k] times the transpose of a packed weight [n, k], plus bias [n]: [T, n], all fp32.

    The rows of x may lie further apart than k.

    Raises:
        ValueError: x is not fp32, or its width is not that of the weight.
    """
    x = _rows(x)
    rows, k = x.shape
    if packed.numel() != packed_numel(n, k):
        raise ValueError(f"x: a weight of {n} outputs that was packed does not have {k} inputs")
    y = torch.empty(rows, n)
    _c("staffel_linear")(
        x.data_ptr(), x.stride(0), rows, packed.data_ptr(), n, k,
        library.pointer(bias), y.data_ptr(), _threads(n * k),
    )  # fmt: skip
    return y


def gather(packed: Tensor, n: int, k: int, ids: Tensor) -> Tensor:
    """Rows `ids` [T] (int64) of the weight [n, k] that was packed: [T, k]. An embedding's lookup.

    Raises:
        IndexError: an id is not in 0 … n - 1.
    """
    ids, rows = ids.contiguous(), torch.empty(len(ids), k)
    wrong = _c("staffel_linear_gather")(
        packed.data_ptr(), n, k, ids.data_ptr(), len(ids), rows.data_ptr()
    )
    _check_ids(wrong, n)
    return rows


def quantize(weight: Tensor) -> Int8Weight:
    """A weight [n, k] as int8, symmetric, one scale per output (row): its largest value is ±127.

    Raises:
        ConfigError: k is beyond what int32 sums can hold.
    """
    n, k = weight.shape
    if k > DEEPEST_INT8:
        raise ConfigError(
            f"quantization: int8 serves layers of up to {DEEPEST_INT8} inputs, and one has {k};"
            " serve this model without it"
        )
    scales = (weight.abs().amax(1) if k else weight.new_zeros(n)).float() / LARGEST
    packed = torch.zeros(packed_numel_int8(n, k), dtype=torch.int8)
    panels = packed.view(_panels(n), -1, PANEL, QUAD)
    for i, panel in enumerate(panels):
        at = slice(i * PANEL, min(n, (i + 1) * PANEL))
        _fill(panel, weight[at], scales[at])
    return Int8Weight(packed, scales, n, k)


def linear_int8(x: Tensor, weight: Int8Weight, bias: Tensor | None = None) -> Tensor:
    """x [T, k] times the transpose of an int8 weight, plus bias [n]: [T, n] fp32.

    Each row of x is rounded to int8 by a scale of its own, symmetrically; sums are exact. A row
    with a NaN or an infinity in it gives NaN.

    Raises:
        ValueError: x is not fp32, or its width is not that of the weight.
    """
    x = _rows(x)
    rows, k = x.shape
    if k != weight.k:
        raise ValueError(f"x: the weight has {weight.k} inputs, not {k}")
    y = torch.empty(rows, weight.n)
    scratch = torch.empty(min(rows, _BLOCK_ROWS) * _up(k, QUAD), dtype=torch.int8)
    _c("staffel_linear_int8")(
        x.data_ptr(), x.stride(0), rows, weight.packed.data_ptr(), weight.scales.data_ptr(),
        weight.n, k, library.pointer(bias), scratch.data_ptr(), y.data_ptr(),
        _threads(weight.n * k),
    )  # fmt: skip
    return y


def gather_int8(weight: Int8Weight, ids: Tensor) -> Tensor:
    """Rows `ids` [T] (int64) of an int8 weight, back in fp32: [T, k].

    Raises:
        IndexError: an id is not in 0 … n - 1.
    """
    ids, rows = ids.contiguous(), torch.empty(len(ids), weight.k)
    wrong = _c("staffel_linear_int8_gather")(
        weight.packed.data_ptr(), weight.scales.data_ptr(), weight.n, weight.k,
        ids.data_ptr(), len(ids), rows.data_ptr(),
    )  # fmt: skip
    _check_ids(wrong, weight.n)
    return rows


def _fill(panel: Tensor, weight: Tensor, scales: Tensor) -> None:
    """One int8 panel [k / 4, PANEL, 4] from up to PANEL rows of the weight."""
    n, k = weight.shape
    divisor = torch.where(scales > 0, scales, 1)[:, None]
    small = torch.zeros(n, panel.shape[0] * QUAD)
    small[:, :k] = (weight.float() / divisor).round_().clamp_(-LARGEST, LARGEST)
    panel[:, :n] = small.view(n, -1, QUAD).transpose(0, 1)


def _panels(n: int) -> int:
    return -(-n // PANEL)


def _up(k: int, multiple: int) -> int:
    return -(-k // multiple) * multiple


def _room(out: Tensor | None, numel: int, dtype: torch.dtype) -> Tensor:
    if out is None:
        return torch.empty(numel, dtype=dtype)
    if out.numel() != numel or out.dtype != dtype or not out.is_contiguous():
        raise ConfigError(
            f"out: {numel} contiguous elements of {dtype} are needed;"
            f" it has {out.numel()} of {out.dtype}"
        )
    return out.view(-1)


def _rows(x: Tensor) -> Tensor:
    """x itself where the kernels can walk its rows, else a contiguous copy."""
    if x.dtype is not torch.float32:
        raise ValueError(f"x: the kernels compute in float32, and it is of {x.dtype}")
    return x if x.stride(1) == 1 and x.stride(0) >= x.shape[1] else x.contiguous()


def _threads(weights: int) -> int:
    return torch.get_num_threads() if weights >= _SHARED else 1


def _check_ids(wrong: int, n: int) -> None:
    if wrong:
        raise IndexError(f"ids: each must be in 0 … {n - 1}, and {wrong} are not")


@cache
def _c(name: str) -> Any:
    x, y_on_threads = (c_void_p, c_int64, c_int64), (c_void_p, c_int)
    signatures = {
        "staffel_linear": (*x, c_void_p, c_int64, c_int64, c_void_p, *y_on_threads),
        "staffel_linear_gather": (c_void_p, c_int64, c_int64, *_IDS, c_void_p),
        "staffel_linear_int8": (
            *x, c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_void_p, *y_on_threads,
        ),
        "staffel_linear_int8_gather": (
            c_void_p, c_void_p, c_int64, c_int64, *_IDS, c_void_p,
        ),
    }  # fmt: skip
    result = c_int64 if name.endswith("gather") else None
    return library.function(name, *signatures[name], result=result)
