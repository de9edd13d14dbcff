"""The paged KV cache: K and V of all layers, in blocks of a few tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from staffel.config import ConfigError
from staffel.transfer import KvShape


@dataclass(frozen=True)
class PagedCache:
    """Views of the cache's memory in which a *row* is one token of one layer.

    Row numbers of layer 0 (`rows`) plus `layer * block_size` are those of a layer: what a step
    needs of a block table is computed once, not per layer.
    """

    k: torch.Tensor
    """[rows, kv_heads, k_width]."""
    v: torch.Tensor
    """[rows, kv_heads, v_width]."""
    layers: int
    block_size: int

    @classmethod
    def over(cls, k: torch.Tensor, v: torch.Tensor) -> PagedCache:
        """Over tensors [num_blocks, layers, block_size, kv_heads, width]."""
        return cls(k.flatten(0, 2), v.flatten(0, 2), k.shape[1], k.shape[2])

    @classmethod
    def scratch(
        cls,
        kv_shape: tuple[int, int, int],
        layers: int,
        blocks: int,
        block_size: int,
        *,
        like: Any,
    ) -> PagedCache:
        """Over memory of its own, of the dtype and on the device of `like`.

        Args:
            kv_shape: KV heads, K width and V width.
        """
        kv_heads, *widths = kv_shape
        shape = (blocks, layers, block_size, kv_heads)
        place = {"dtype": like.dtype, "device": like.device}
        k, v = (torch.zeros(*shape, width, **place) for width in widths)
        return cls.over(k, v)

    def rows(self, blocks: np.ndarray[Any, Any], offsets: np.ndarray[Any, Any]) -> torch.Tensor:
        """Row numbers in layer 0 of the tokens at `offsets` within `blocks` (same shapes)."""
        rows = blocks * (self.layers * self.block_size) + offsets
        return torch.from_numpy(rows).to(self.k.device)

    def write(self, layer: int, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put k [T, kv_heads, k_width] and v [T, kv_heads, v_width] at `rows` [T]."""
        rows = rows + layer * self.block_size
        self.k.index_copy_(0, rows, k)
        self.v.index_copy_(0, rows, v)


def blocks_that_fit(
    kv_bytes: int, shape: KvShape, max_model_len: int, option: str = "--kv-memory"
) -> int:
    """How many blocks `kv_bytes` hold.

    Args:
        option: what gives more bytes.

    Raises:
        ConfigError: they can't hold one sequence of `max_model_len` tokens.
    """
    blocks = kv_bytes // shape.block_bytes
    needed = -(-max_model_len // shape.block_size)
    if blocks < needed:
        raise ConfigError(
            f"{option}: {kv_bytes} bytes of KV hold {blocks * shape.block_size} tokens; one "
            f"sequence of --max-model-len {max_model_len} needs {needed * shape.block_bytes} "
            "bytes; give more, or a smaller --max-model-len (or --block-size: blocks are whole)"
        )
    return blocks
