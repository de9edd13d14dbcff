"""Attention over a paged cache: what the C function `staffel_attention` takes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from staffel.kernels import library

MOST_ROWS = 126
"""Most rows (token and head) of a tile: it stays in the second-level cache, and keys are
transposed once for all of them. A multiple of the rows that the kernel computes at a time."""


def _each(kind: Any, *names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names]


_POINTER, _INTEGER, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


class Step(ctypes.Structure):
    """What a step's layers have in common, as source/paged.h describes it."""

    _fields_ = [
        *_each(_POINTER, "k_cache", "v_cache"),
        *_each(_INTEGER, "blocks", "layers", "block_size", "kv_heads", "k_width", "v_width"),
        *_each(_INTEGER, "sequences"),
        *_each(_POINTER, "tables"),
        *_each(_INTEGER, "table_stride"),
        *_each(_POINTER, "starts", "counts", "offsets", "tiles"),
        *_each(_INTEGER, "tile_count", "tile_rows"),
        *_each(_POINTER, "scratch"),
        *_each(_INTEGER, "threads"),
    ]


def kernel() -> Callable[..., None]:
    """Writes a layer's keys and values into the cache, then attends.

    Takes the address of a Step, the layer's number and heads, each of q, k and v with its strides
    from token to token and from head to head, out, sinks, window, scaling and softcap. The call
    is trusted: see `checker` for the block tables.
    """
    tensor = (_POINTER, _INTEGER, _INTEGER)
    return library.function(
        "staffel_attention", _POINTER, _INTEGER, _INTEGER, *tensor, *tensor, *tensor,
        _POINTER, _POINTER, _INTEGER, _DOUBLE, _DOUBLE,
    )  # fmt: skip


def checker() -> Callable[[Any], int]:
    """Gives the first sequence whose block table can't be right, or -1; takes a Step's address."""
    return library.function("staffel_attention_check", ctypes.c_void_p, result=ctypes.c_int64)


def scratch_floats(rows: int, kv_heads: int, k_width: int, v_width: int) -> int:
    """How many floats of scratch memory each thread needs for tiles of at most `rows` rows."""
    integers = [ctypes.c_int64] * 4
    count = library.function("staffel_attention_scratch", *integers, result=ctypes.c_int64)
    return count(rows, kv_heads, k_width, v_width)
