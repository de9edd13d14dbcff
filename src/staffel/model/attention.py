"""The nouns of attention over a paged cache, whatever device computes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Flavour:
    """How one layer attends, beyond plain scaled dot products."""

    scaling: float
    window: int | None = None
    """A key is visible when its position > the query's - window."""
    softcap: float | None = None
    """Scores become softcap * tanh(scores / softcap)."""
    sinks: Tensor | None = None
    """[heads]: one more logit per head in the softmax, that attends to nothing."""


@dataclass(frozen=True, eq=False)
class PackedStep:
    """One batch's tokens, sequence after sequence, and where their KV lies."""

    tables: np.ndarray[Any, Any]
    """int64 [sequences, blocks]: block tables; entries beyond a sequence's end are ignored."""
    starts: np.ndarray[Any, Any]
    """int64 [sequences]: position of each one's first token in this step."""
    counts: np.ndarray[Any, Any]
    """int64 [sequences], each above 0: how many tokens of it are computed."""

    @property
    def offsets(self) -> np.ndarray[Any, Any]:
        """int64 [sequences]: where each one's tokens begin among the packed ones."""
        return np.cumsum(self.counts) - self.counts

    @property
    def owners(self) -> np.ndarray[Any, Any]:
        """int64 [T]: the sequence that each token belongs to."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    @property
    def positions(self) -> np.ndarray[Any, Any]:
        """int64 [T]: each token's position in its sequence."""
        within = np.arange(int(self.counts.sum())) - np.repeat(self.offsets, self.counts)
        return within + np.repeat(self.starts, self.counts)

    def tiles(self, most: int) -> np.ndarray[Any, Any]:
        """int64 [tiles, 3]: sequence, first token and tokens, of which a tile has up to `most`."""
        sequences = np.repeat(np.arange(len(self.counts)), -(-self.counts // most))
        first = (np.arange(len(sequences)) - np.searchsorted(sequences, sequences)) * most
        tokens = np.minimum(self.counts[sequences] - first, most)
        return np.stack([sequences, first, tokens], axis=1)

    def only_decodes(self, keep: list[int]) -> bool:
        """Whether it computes one token of each sequence, and all of them are kept."""
        size = len(self.counts)
        return len(keep) == size == int(self.counts.sum()) and keep == list(range(size))


class PagedAttention(Protocol):
    """Attention of one model over its paged cache, on one kind of device."""

    def begin(self, step: PackedStep) -> None:
        """Say what the next forward pass computes."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, flavour: Flavour) -> Tensor:
        """Put the step's k and v into the cache, then attend.

        q is [T, heads, k_width], k is [T, kv_heads, k_width], v is [T, kv_heads, v_width];
        gives [T, heads, v_width].
        """
