"""Attention over the paged cache on a GPU, in Triton: keys and values are read where they lie.

A *tile* is a few consecutive tokens of a sequence; for one kv head it has a row for each token and
each query head that shares that kv head. A program takes a tile, a kv head and a *part* of the
tile's keys through an online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867; tiles of it:
Dao et al. 2022, arXiv:2205.14135). Steps that only decode have too few tiles to keep a GPU busy:
their keys are split into parts, which a second kernel puts together (Flash-Decoding, Dao et al.
2023).

Nothing about a step but the number of its tiles and parts is decided on the host, so a decode step
can be captured as a graph and played again with other tables and lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from staffel.model.attention import Flavour, PackedStep
from staffel.model.cache import PagedCache

Ints = np.ndarray[Any, Any]

_ROWS = 64
"""Rows of a tile of a prompt."""
_LEAST_ROWS = 16
"""What a matrix unit takes."""
_KEYS = 64
"""Keys at a time."""
_WIDE = 32 << 10
"""Bytes of keys and values at a time of which a GPU's shared memory holds no three."""
_PROGRAMS = 512
"""As many as keep a GPU busy: decode steps are split into parts until there are so many."""
_MOST_PARTS = 16
_NO_WINDOW = 1 << 30


@dataclass(frozen=True, eq=False)
class _Plan:
    """A step, on the device. Arrays are int32 but for the rows."""

    rows: Tensor
    """int64 [T]: the cache's row in layer 0 of each packed token."""
    tables: Tensor
    """[sequences, blocks]."""
    starts: Tensor
    """[sequences]: position of the first token."""
    offsets: Tensor
    """[sequences]: its place among the packed tokens."""
    tiles: Tensor
    """[tiles, 3]: sequence, first token of the step, tokens."""
    tile_tokens: int
    """The most of one."""
    parts: int


class TritonAttention:
    """A `PagedAttention`. One forward pass at a time."""

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache
        self._step: PackedStep | None = None
        self._plan: _Plan | None = None

    def begin(self, step: PackedStep) -> None:
        self._step, self._plan = step, None

    def begin_in_place(self, step: PackedStep, places: Places) -> None:
        """Say what a step computes that was captured with these places: one token of each
        sequence, of as many or fewer; the others write to the places' spare block."""
        places.fill(step)
        self._plan = places.plan

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, flavour: Flavour) -> Tensor:
        cache = self._cache
        q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
        kv_heads, heads = k.shape[1], q.shape[1]
        plan = self._planned(heads // kv_heads)
        _write[(len(q), kv_heads)](
            k, v, cache.k, cache.v, plan.rows, layer * cache.block_size,
            k.stride(0), k.stride(1), v.stride(0), v.stride(1), kv_heads,
            K=k.shape[2], V=v.shape[2], K_PAD=_pad(k.shape[2]), V_PAD=_pad(v.shape[2]),
        )  # fmt: skip
        out = q.new_empty(len(q), heads, v.shape[2])
        self._launch(plan, layer, q, out, flavour)
        return out

    def _planned(self, group: int) -> _Plan:
        """The step's plan; made at its first layer, for layers with so many heads a kv head."""
        if self._plan is None:
            assert self._step is not None
            self._plan = _make_plan(self._step, self._cache, group)
        return self._plan

    def _launch(self, plan: _Plan, layer: int, q: Tensor, out: Tensor, flavour: Flavour) -> None:
        cache, heads = self._cache, q.shape[1]
        kv_heads, k_width, v_width = *cache.k.shape[1:], cache.v.shape[2]
        group = heads // kv_heads
        rows = max(_LEAST_ROWS, _pad(plan.tile_tokens * group))
        grid = (len(plan.tiles), kv_heads, plan.parts)
        shape = (*grid, rows)
        partial = (
            out.new_empty(*shape, _pad(v_width), dtype=torch.float32) if plan.parts > 1 else out
        )
        sums = out.new_empty(2, *shape, dtype=torch.float32) if plan.parts > 1 else out
        sinks = out if flavour.sinks is None else flavour.sinks
        widths = {
            "V": v_width, "V_PAD": _pad(v_width), "GROUP": group, "ROWS": rows, "PARTS": plan.parts,
            "SINKS": flavour.sinks is not None,
        }  # fmt: skip
        _attend[grid](
            q, cache.k, cache.v, out, partial, sums, sinks, plan.tables, plan.starts,
            plan.offsets, plan.tiles, plan.tables.stride(0), layer * cache.block_size,
            cache.layers * cache.block_size, q.stride(0), q.stride(1), kv_heads,
            _NO_WINDOW if flavour.window is None else flavour.window,
            flavour.scaling, flavour.softcap or 1.0,
            BLOCK=cache.block_size, K=k_width, K_PAD=_pad(k_width), KEYS=_KEYS,
            CAP=flavour.softcap is not None, num_stages=_stages(cache), **widths,
        )  # fmt: skip
        if plan.parts > 1:
            _put_together[grid[:2]](
                partial, sums, sinks, out, plan.offsets, plan.tiles, kv_heads, **widths
            )


def _stages(cache: PagedCache) -> int:
    """How many runs of keys are on their way at a time: wide ones fill the shared memory."""
    run = _KEYS * (_pad(cache.k.shape[2]) + _pad(cache.v.shape[2])) * cache.k.element_size()
    return 1 if run > _WIDE else 3


def _pad(width: int) -> int:
    return max(_LEAST_ROWS, triton.next_power_of_2(width))


# ---- plans


def _make_plan(step: PackedStep, cache: PagedCache, group: int) -> _Plan:
    owners, positions = step.owners, step.positions
    blocks = step.tables[owners, positions // cache.block_size]
    tiles = step.tiles(max(1, _ROWS // group))
    only_decodes = int(step.counts.max()) == 1
    return _Plan(
        rows=cache.rows(blocks, positions % cache.block_size),
        tables=_on_device(step.tables, cache),
        starts=_on_device(step.starts, cache),
        offsets=_on_device(step.offsets, cache),
        tiles=_on_device(tiles, cache),
        tile_tokens=int(tiles[:, 2].max()),
        parts=_parts(len(tiles) * cache.k.shape[1]) if only_decodes else 1,
    )


def _parts(programs: int) -> int:
    """How many parts of keys make about enough programs of so many."""
    return min(_MOST_PARTS, triton.next_power_of_2(-(-_PROGRAMS // programs)))


def _on_device(numbers: Ints, cache: PagedCache) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(numbers, np.int32)).to(cache.k.device)


class Places:
    """A decode step of `size` sequences at fixed addresses, to be filled anew for each step."""

    def __init__(self, cache: PagedCache, size: int, blocks: int, spare: int) -> None:
        """`blocks`: of the longest table. `spare`: a block that belongs to nobody."""
        self._cache, self._size, self._spare = cache, size, spare
        self._tables = np.full((size, blocks), spare, np.int32)
        each = np.arange(size)
        self.plan = _Plan(
            rows=cache.rows(np.full(size, spare), np.zeros(size, np.int64)),
            tables=_on_device(self._tables, cache),
            starts=_on_device(np.zeros(size), cache),
            offsets=_on_device(each, cache),
            tiles=_on_device(np.stack([each, np.zeros(size), np.ones(size)], axis=1), cache),
            tile_tokens=1,
            parts=_parts(size * cache.k.shape[1]),
        )

    def fill(self, step: PackedStep) -> None:
        real, block_size = len(step.starts), self._cache.block_size
        starts, blocks = np.zeros(self._size, np.int64), np.full(self._size, self._spare)
        starts[:real] = step.starts
        blocks[:real] = step.tables[np.arange(real), step.starts // block_size]
        self._tables[:] = self._spare
        self._tables[:real, : step.tables.shape[1]] = step.tables
        self.plan.rows.copy_(self._cache.rows(blocks, starts % block_size))
        self.plan.tables.copy_(torch.from_numpy(self._tables))
        self.plan.starts.copy_(torch.from_numpy(starts))


# ---- kernels


# Numbers that change from step to step, or layer to layer, would each be compiled for anew.
@triton.jit(do_not_specialize=["layer_rows"])
def _write(
    k, v, k_cache, v_cache, rows, layer_rows, k_token, k_head, v_token, v_head, kv_heads,
    K: tl.constexpr, V: tl.constexpr, K_PAD: tl.constexpr, V_PAD: tl.constexpr,
):  # fmt: skip
    """Put one token's key and value of one kv head into the cache."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = (tl.load(rows + token) + layer_rows) * kv_heads + head
    i, j = tl.arange(0, K_PAD), tl.arange(0, V_PAD)
    key = tl.load(k + token * k_token + head * k_head + i, mask=i < K)
    tl.store(k_cache + place * K + i, key, mask=i < K)
    value = tl.load(v + token * v_token + head * v_head + j, mask=j < V)
    tl.store(v_cache + place * V + j, value, mask=j < V)


@triton.jit(do_not_specialize=["layer_rows", "table_stride", "window"])
def _attend(
    q, k_cache, v_cache, out, partial, sums, sinks, tables, starts, offsets, tiles,
    table_stride, layer_rows, block_rows, q_token, q_head, kv_heads, window, scaling, softcap,
    BLOCK: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, KEYS: tl.constexpr,
    CAP: tl.constexpr, V: tl.constexpr, V_PAD: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """A tile, for one kv head and one part of its keys."""
    tile, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence = tl.load(tiles + tile * 3)
    first, tokens = tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
    start = tl.load(starts + sequence) + first
    row = tl.arange(0, ROWS)
    head, position = kv_head * GROUP + row % GROUP, start + row // GROUP
    exists = row // GROUP < tokens
    place = (tl.load(offsets + sequence) + first + row // GROUP).to(tl.int64)
    i, j = tl.arange(0, K_PAD), tl.arange(0, V_PAD)
    query = tl.load(
        q + place[:, None] * q_token + head[:, None] * q_head + i[None, :],
        mask=exists[:, None] & (i < K)[None, :], other=0.0,
    )  # fmt: skip

    # The keys that any row sees, and this part of them.
    begin, end = tl.maximum(start + 1 - window, 0), start + tokens
    share = tl.cdiv(tl.cdiv(end - begin, KEYS), PARTS) * KEYS
    begin += part * share
    end = tl.minimum(end, begin + share)

    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    found = tl.zeros([ROWS, V_PAD], tl.float32)
    for at in range(begin, end, KEYS):
        key = at + tl.arange(0, KEYS)
        real = key < end
        block = tl.load(tables + sequence * table_stride + key // BLOCK, mask=real, other=0)
        lies = (block.to(tl.int64) * block_rows + layer_rows + key % BLOCK) * kv_heads + kv_head
        keys = tl.load(
            k_cache + lies[None, :] * K + i[:, None],
            mask=real[None, :] & (i < K)[:, None], other=0.0,
        )  # fmt: skip
        scores = tl.dot(query, keys, input_precision="ieee") * scaling
        if CAP:
            # tanh x = 2 sigmoid(2 x) - 1
            scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
        age = position[:, None] - key[None, :]
        scores = tl.where(real[None, :] & (age >= 0) & (age < window), scores, float("-inf"))
        now = tl.maximum(largest, tl.max(scores, 1))
        base = tl.where(now == float("-inf"), 0.0, now)  # a row may have seen nothing so far
        weights, factor = tl.exp(scores - base[:, None]), tl.exp(largest - base)
        values = tl.load(
            v_cache + lies[:, None] * V + j[None, :],
            mask=real[:, None] & (j < V)[None, :], other=0.0,
        )  # fmt: skip
        found = found * factor[:, None]
        found += tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        total = total * factor + tl.sum(weights, 1)
        largest = now

    if PARTS == 1:
        found = _finished(found, largest, total, sinks, head, exists, SINKS)
        heads = kv_heads * GROUP
        tl.store(
            out + (place[:, None] * heads + head[:, None]) * V + j[None, :],
            found.to(out.dtype.element_ty), mask=exists[:, None] & (j < V)[None, :],
        )  # fmt: skip
    else:
        slot = ((tile * kv_heads + kv_head) * PARTS + part) * ROWS + row
        rows_in_all = tl.num_programs(0) * kv_heads * PARTS * ROWS
        tl.store(sums + slot, largest)
        tl.store(sums + rows_in_all + slot, total)
        tl.store(partial + slot.to(tl.int64)[:, None] * V_PAD + j[None, :], found)


@triton.jit
def _put_together(
    partial, sums, sinks, out, offsets, tiles, kv_heads,
    V: tl.constexpr, V_PAD: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    PARTS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """A tile's parts for one kv head: their sums, each by the largest score of all."""
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(tiles + tile * 3)
    first, tokens = tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
    row, j = tl.arange(0, ROWS), tl.arange(0, V_PAD)
    rows_in_all = tl.num_programs(0) * kv_heads * PARTS * ROWS
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    found = tl.zeros([ROWS, V_PAD], tl.float32)
    for part in range(PARTS):
        slot = ((tile * kv_heads + kv_head) * PARTS + part) * ROWS + row
        theirs = tl.load(sums + slot)
        now = tl.maximum(largest, theirs)
        base = tl.where(now == float("-inf"), 0.0, now)
        factor, its = tl.exp(largest - base), tl.exp(theirs - base)
        more = tl.load(partial + slot.to(tl.int64)[:, None] * V_PAD + j[None, :])
        found = found * factor[:, None] + more * its[:, None]
        total = total * factor + tl.load(sums + rows_in_all + slot) * its
        largest = now
    exists, head = row // GROUP < tokens, kv_head * GROUP + row % GROUP
    found = _finished(found, largest, total, sinks, head, exists, SINKS)
    place = (tl.load(offsets + sequence) + first + row // GROUP).to(tl.int64)
    heads = kv_heads * GROUP
    tl.store(
        out + (place[:, None] * heads + head[:, None]) * V + j[None, :],
        found.to(out.dtype.element_ty), mask=exists[:, None] & (j < V)[None, :],
    )  # fmt: skip


@triton.jit
def _finished(found, largest, total, sinks, head, exists, SINKS: tl.constexpr):
    """The weighted mean of values; a sink is one more score, of a value of zeros."""
    if SINKS:
        sink = tl.load(sinks + head, mask=exists, other=0.0).to(tl.float32)
        most = tl.maximum(largest, sink)
        found = found * tl.exp(largest - most)[:, None]
        total = total * tl.exp(largest - most) + tl.exp(sink - most)
    # Rows that don't exist may have seen nothing.
    return found / tl.where(total == 0, 1.0, total)[:, None]
