"""Attention over the paged cache in C: keys and values are read where they lie."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from torch import Tensor

from staffel.config import ConfigError
from staffel.kernels import attention as kernels
from staffel.kernels import library
from staffel.model.attention import Flavour, PackedStep, PagedAttention
from staffel.model.attention_cpu import CpuAttention
from staffel.model.cache import PagedCache

Ints = np.ndarray[Any, Any]

_NO_WINDOW = 1 << 62


def best(cache: PagedCache) -> PagedAttention:
    """The fastest attention over this cache: on a CPU in C, where that is built and the cache is
    float32."""
    if cache.k.is_cuda:
        # It comes with torch's CUDA builds alone.
        from staffel.model.attention_triton import TritonAttention

        return TritonAttention(cache)
    if cache.k.dtype != torch.float32 or library.level() is None:
        return CpuAttention(cache)
    return KernelAttention(cache)


class KernelAttention:
    """A `PagedAttention` for float32. One forward pass at a time; it uses torch's threads.

    Raises:
        ConfigError: the cache isn't of float32, or not contiguous.
    """

    def __init__(self, cache: PagedCache) -> None:
        _check_cache(cache)
        self._cache = cache
        self._attend, self._check = kernels.kernel(), kernels.checker()
        self._shared = kernels.Step(
            k_cache=cache.k.data_ptr(),
            v_cache=cache.v.data_ptr(),
            blocks=cache.k.shape[0] // (cache.layers * cache.block_size),
            layers=cache.layers,
            block_size=cache.block_size,
            kv_heads=cache.k.shape[1],
            k_width=cache.k.shape[2],
            v_width=cache.v.shape[2],
        )
        self._address = ctypes.addressof(self._shared)
        self._heads = 0
        self._scratch = torch.empty(0)

    def begin(self, step: PackedStep) -> None:
        """Raises ValueError where a block table can't be right (a fault of the engine)."""
        parts = (step.tables, step.starts, step.counts, step.offsets)
        # The C struct holds addresses only: what they point to is kept here.
        self._arrays = tables, starts, counts, offsets = [_int64(part) for part in parts]
        self._step = step
        shared = self._shared
        shared.sequences, shared.table_stride = tables.shape
        shared.tables, shared.starts = tables.ctypes.data, starts.ctypes.data
        shared.counts, shared.offsets = counts.ctypes.data, offsets.ctypes.data
        wrong = self._check(self._address)
        if wrong >= 0:
            raise ValueError(
                f"sequence {wrong} of the batch: its block table {tables[wrong].tolist()} doesn't "
                f"do for {counts[wrong]} tokens from {starts[wrong]} on"
            )
        if self._heads:
            self._cut(self._heads)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, flavour: Flavour) -> Tensor:
        heads = q.shape[1]
        if self._heads != heads:
            library.unrecordable("layers differ in their number of heads, or none was seen yet")
            self._cut(heads)
        q, k, v = _rows(q), _rows(k), _rows(v)
        sinks = None if flavour.sinks is None else flavour.sinks.float().contiguous()
        out = q.new_empty(q.shape[0], heads, self._shared.v_width)
        self._attend(
            self._address, layer, heads,
            q.data_ptr(), *q.stride()[:2], k.data_ptr(), *k.stride()[:2],
            v.data_ptr(), *v.stride()[:2], out.data_ptr(), library.pointer(sinks),
            _NO_WINDOW if flavour.window is None else flavour.window,
            flavour.scaling, flavour.softcap or 0.0,
        )  # fmt: skip
        return out

    def _cut(self, heads: int) -> None:
        """Cut the step into tiles for layers with that number of heads."""
        shared = self._shared
        self._heads, group = heads, heads // shared.kv_heads
        self._tiles = _int64(self._step.tiles(max(1, kernels.MOST_ROWS // group)))
        shared.tile_rows = int(self._tiles[:, 2].max()) * group
        shared.tiles, shared.tile_count = self._tiles.ctypes.data, len(self._tiles)
        shared.threads = torch.get_num_threads()
        each = kernels.scratch_floats(
            shared.tile_rows, shared.kv_heads, shared.k_width, shared.v_width
        )
        if self._scratch.numel() < each * shared.threads:
            self._scratch = torch.empty(each * shared.threads)
        shared.scratch = self._scratch.data_ptr()


def _check_cache(cache: PagedCache) -> None:
    for name, part in (("k", cache.k), ("v", cache.v)):
        if part.dtype != torch.float32:
            raise ConfigError(
                f"cache.{name}: attention in C is for float32, not {part.dtype}; "
                "take attention_cpu.CpuAttention"
            )
        if not part.is_contiguous():
            raise ConfigError(f"cache.{name}: must be contiguous; lay it out so")


def _int64(part: Ints) -> Ints:
    return np.ascontiguousarray(part, np.int64)


def _rows(x: Tensor) -> Tensor:
    """x itself where each row's numbers lie side by side, as they nearly always do."""
    return x if x.stride(2) == 1 else x.contiguous()
