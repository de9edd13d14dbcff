"""Decode steps as CUDA graphs: a step of few sequences is one launch instead of hundreds."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from staffel.model.attention import PackedStep
from staffel.model.attention_triton import Places, TritonAttention
from staffel.model.cache import PagedCache
from staffel.model.loader import CausalLM

log = logging.getLogger(__name__)

Ints = np.ndarray[Any, Any]


class Graphs:
    """One for each of some sizes; a step takes the next larger one, filled up."""

    @torch.inference_mode()
    def __init__(
        self,
        model: CausalLM,
        attention: TritonAttention,
        cache: PagedCache,
        *,
        most: int,
        blocks: int,
        spare: int,
    ) -> None:
        """Capture them, the largest first: the others fit into its memory.

        Args:
            most: sequences of the largest step.
            blocks: of the longest block table.
            spare: a block that belongs to nobody; rows without a sequence write there.

        Raises:
            RuntimeError: the model waits for what it computes, or there is too little memory.
        """
        self._attention = attention
        device = model.net.device
        before = torch.cuda.memory_reserved(device)
        room = _Room(
            torch.cuda.Stream(device),
            torch.cuda.graph_pool_handle(),
            torch.empty(most, model.vocab_size, dtype=model.net.dtype, device=device),
        )
        self._graphs: dict[int, _Graph] = {}
        wanted = sorted(sizes(most), reverse=True)
        for size in wanted:
            log.info("capturing CUDA graph %d of %d", len(self._graphs) + 1, len(wanted))
            places = Places(cache, size, blocks, spare)
            attention.begin_in_place(_nothing(size, spare), places)
            self._graphs[size] = _Graph(model, places, size, room)
        self._sizes = sorted(self._graphs)
        grown = torch.cuda.memory_reserved(device) - before
        log.info("%d CUDA graphs, %d MiB", len(self._sizes), grown >> 20)

    def logits(self, step: PackedStep, ids: Ints, keep: list[int]) -> Tensor | None:
        """[len(keep), vocab] of the packed tokens `keep` of `ids`; None: there is no such graph."""
        size = len(ids)
        if size > self._sizes[-1] or not step.only_decodes(keep):
            return None
        graph = self._graphs[self._sizes[bisect_left(self._sizes, size)]]
        self._attention.begin_in_place(step, graph.places)
        return graph.replay(ids, step.positions)[:size]


def sizes(most: int) -> Iterator[int]:
    """1, 2, 4, 8, and then in eights: at most seven rows are computed for nothing."""
    yield from (size for size in (1, 2, 4) if size < most)
    yield from range(8, most, 8)
    yield most


def _nothing(size: int, spare: int) -> PackedStep:
    return PackedStep(np.full((size, 1), spare), np.zeros(size, np.int64), np.ones(size, np.int64))


@dataclass(frozen=True)
class _Room:
    """What all graphs share."""

    side: torch.cuda.Stream
    pool: Any
    logits: Tensor
    """[sequences of the largest, vocab]."""


class _Graph:
    def __init__(self, model: CausalLM, places: Places, size: int, room: _Room) -> None:
        device = model.net.device
        self.places = places
        self._ids, self._positions = torch.zeros(2, size, dtype=torch.int64, device=device)
        self._logits = room.logits[:size]
        keep = torch.arange(size, device=device)

        def run() -> None:
            self._logits.copy_(model.logits(self._ids, self._positions, keep))

        _warm_up(run, room.side, device)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            self._graph, pool=room.pool, stream=room.side, capture_error_mode="thread_local"
        ):
            run()

    def replay(self, ids: Ints, positions: Ints) -> Tensor:
        self._ids[: len(ids)].copy_(torch.from_numpy(ids))
        self._positions[: len(ids)].copy_(torch.from_numpy(positions))
        self._graph.replay()
        return self._logits


def _warm_up(run: Callable[[], None], side: torch.cuda.Stream, device: torch.device) -> None:
    """Run twice: kernels are compiled, libraries choose theirs; and then nothing may wait for the
    device. A capture that fails for that leaves torch's streams in disorder."""
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        run()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream(device).wait_stream(side)
