"""Drawing a token from logits (source/sampling.c)."""

from __future__ import annotations

from ctypes import c_double, c_int64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from staffel.kernels import library


def can_draw(row: Tensor) -> bool:
    """Whether `draw` takes it, and there are kernels."""
    return (
        row.dtype is torch.float32
        and row.device.type == "cpu"
        and row.is_contiguous()
        and library.level() is not None
    )


def draw(row: Tensor, temperature: float, key: int) -> int:
    """The place of the largest row / temperature + noise; row [vocabulary] is without NaN and +inf.

    The noise is the one of `staffel.model.sampler`; `key` is what it hashes each place with, in
    64 bits.
    """
    return _draw()(row.data_ptr(), len(row), temperature, key)


@cache
def _draw() -> Any:
    return library.function("staffel_draw", c_void_p, c_int64, c_double, c_int64, result=c_int64)
