"""What the executor needs of a transfer, whatever carries the bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from msgspec import Struct

from staffel.control.messages import KvRegion


class Unreachable(OSError):
    """A peer's memory can't be opened: its process is gone, or never had it."""


class KvShape(Struct, frozen=True, kw_only=True):
    """How much KV an instance holds, and how it is laid out."""

    slots: int
    num_blocks: int
    layers: int
    block_size: int
    kv_heads: int
    k_width: int
    v_width: int
    dtype: torch.dtype

    @property
    def k_block_bytes(self) -> int:
        return self._elements * self.k_width * self.dtype.itemsize

    @property
    def v_block_bytes(self) -> int:
        return self._elements * self.v_width * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes that one block takes, K and V of all layers."""
        return self.k_block_bytes + self.v_block_bytes

    @property
    def _elements(self) -> int:
        return self.layers * self.block_size * self.kv_heads


class KvMemory(Protocol):
    """The owner's side: the cache's memory, and the words that say which dispatch lives where."""

    region: KvRegion
    k: torch.Tensor
    """[num_blocks, layers, block_size, kv_heads, k_width]."""
    v: torch.Tensor
    """[num_blocks, layers, block_size, kv_heads, v_width]."""

    def set_generation(self, slot: int, dispatch: int) -> None: ...

    def clear(self, slot: int) -> None: ...

    def close(self) -> None:
        """Give the memory back. `k` and `v` are gone after it."""


class Peer(Protocol):
    """The reader's side: another instance's cache."""

    def read_blocks(self, source_blocks: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy the peer's `source_blocks[i]` to the own `blocks[i]`; until `finish` the copy may
        still be under way."""

    def wait(self) -> None:
        """Until what was asked for is copied."""

    def finish(self) -> float:
        """Wait, and say how many seconds all copies took since this was last asked."""

    def confirm(self, slot: int, dispatch: int) -> bool:
        """Whether `dispatch` lives in the peer's `slot` now.

        Asked after a copy: the owner clears the word before it reuses a block, so a yes says
        that what was copied is whole.
        """

    def close(self) -> None: ...
