"""Attention over the paged cache on a CPU: gather the visible keys, then dense products.

A step's sequences form groups: each prefill chunk is one by itself, and decoding sequences of
like length share one. Work in Python is per group, never per token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from staffel.model.attention import Flavour, PackedStep
from staffel.model.cache import PagedCache

_GROUP_KEYS = 16384
"""Most keys gathered at a time for decoding sequences: keeps a gather near the caches."""
_WASTE = 1.25
_SLACK = 32
"""Sequences share a group while the longest is at most _WASTE times the shortest + _SLACK."""

Ints = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class _Group:
    """R sequences that compute Q tokens each and see at most L keys."""

    queries: Tensor
    """int64 [R * Q]: places among the packed tokens."""
    keys: Tensor
    """int64 [R, L]: cache rows of layer 0; padding repeats a sequence's last one."""
    visible: Tensor | None
    """bool [R, 1, Q, L]; None: all of them."""


class CpuAttention:
    """A `PagedAttention`. One forward pass at a time."""

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache
        self._scratch: dict[str, Tensor] = {}

    def begin(self, step: PackedStep) -> None:
        owners, positions = step.owners, step.positions
        self._step = step
        self._written = _rows(self._cache, step.tables, owners, positions)
        self._groups: dict[int | None, list[_Group]] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, flavour: Flavour) -> Tensor:
        self._cache.write(layer, self._written, k, v)
        out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
        for group in self._plan(flavour.window):
            rows = (group.keys + layer * self._cache.block_size).flatten()
            keys = self._gather("k", self._cache.k, rows, group)
            values = self._gather("v", self._cache.v, rows, group)
            queries = q.index_select(0, group.queries)
            queries = queries.unflatten(0, (group.keys.shape[0], -1)).transpose(1, 2)
            seen = _attend(queries, keys, values, group.visible, flavour)
            out.index_copy_(0, group.queries, seen.transpose(1, 2).flatten(0, 1))
        return out

    def _plan(self, window: int | None) -> list[_Group]:
        """The step's groups under that window; made at the first layer that asks."""
        if window not in self._groups:
            self._groups[window] = list(_groups(self._cache, self._step, window))
        return self._groups[window]

    def _gather(self, name: str, source: Tensor, rows: Tensor, group: _Group) -> Tensor:
        """[R, kv_heads, L, width], in memory that the next gather of that name uses again."""
        buffer = self._scratch.get(name)
        if buffer is None or buffer.shape[0] < len(rows):
            buffer = self._scratch[name] = source.new_empty(len(rows), *source.shape[1:])
        taken = torch.index_select(source, 0, rows, out=buffer[: len(rows)])
        return taken.unflatten(0, group.keys.shape).transpose(1, 2)


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, how: Flavour) -> Tensor:
    """q [R, heads, Q, width] over k and v [R, kv_heads, L, width]: [R, heads, Q, v_width]."""
    if how.softcap is None and how.sinks is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, scale=how.scaling, enable_gqa=True
        )
    return _attend_by_hand(q, k, v, visible, how)


def _attend_by_hand(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, how: Flavour
) -> Tensor:
    """The same for what the library's attention can't do: softcap and sinks."""
    sequences, heads, tokens, _ = q.shape
    # The heads that share keys become more queries of one head: no key is copied.
    shared = q.reshape(sequences, k.shape[1], -1, q.shape[3])
    scores = (shared @ k.transpose(2, 3)).float() * how.scaling
    scores = scores.view(sequences, heads, tokens, -1)
    if how.softcap is not None:
        scores = how.softcap * torch.tanh(scores / how.softcap)
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    weights = _softmax(scores, how.sinks).to(v.dtype)
    out = weights.view(sequences, k.shape[1], -1, weights.shape[3]) @ v
    return out.view(sequences, heads, tokens, -1)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Over the last axis of [R, heads, Q, L]; a sink takes its share and gives nothing."""
    if sinks is None:
        return scores.softmax(-1)
    extra = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, extra], -1).softmax(-1)[..., :-1]


# ---- planning a step


def _rows(cache: PagedCache, tables: Ints, owners: Ints, positions: Ints) -> Tensor:
    """Cache rows of layer 0 for tokens at `positions` of the sequences `owners`."""
    block, offset = np.divmod(positions, cache.block_size)
    return cache.rows(tables[owners, block], offset)


def _groups(cache: PagedCache, step: PackedStep, window: int | None) -> Iterator[_Group]:
    for sequence in np.flatnonzero(step.counts > 1):
        yield _group(cache, step, np.array([sequence]), window)
    decoding = np.flatnonzero(step.counts == 1)
    for members in _alike(decoding, _seen(step.starts[decoding], window)):
        yield _group(cache, step, members, window)


def _seen(positions: Ints, window: int | None) -> Ints:
    """How many keys a query at each position sees."""
    return positions + 1 if window is None else np.minimum(positions + 1, window)


def _alike(members: Ints, lengths: Ints) -> Iterator[Ints]:
    """Split sequences into runs of like length, so that padding to the longest wastes little."""
    order = np.argsort(lengths, kind="stable")
    members, lengths = members[order], lengths[order]
    first = 0
    for end in range(1, len(members) + 1):
        if end == len(members) or not _fits(lengths[first], lengths[end], end - first + 1):
            yield members[first:end]
            first = end


def _fits(shortest: int, longest: int, sequences: int) -> bool:
    return longest <= shortest * _WASTE + _SLACK and longest * sequences <= _GROUP_KEYS


def _group(cache: PagedCache, step: PackedStep, members: Ints, window: int | None) -> _Group:
    """Sequences that all compute the same number of tokens."""
    starts = step.starts[members, None]
    within = np.arange(step.counts[members[0]])
    queries = starts + within
    first = starts + 1 - _seen(starts, window)
    keys = first + np.arange((queries[:, -1:] + 1 - first).max())
    visible = keys[:, None] <= queries[:, :, None]
    if window is not None:
        visible &= keys[:, None] > queries[:, :, None] - window
    return _Group(
        queries=torch.from_numpy((step.offsets[members, None] + within).ravel()),
        keys=_rows(cache, step.tables, members[:, None], np.minimum(keys, queries[:, -1:])),
        visible=None if visible.all() else torch.from_numpy(visible[:, None]),
    )
