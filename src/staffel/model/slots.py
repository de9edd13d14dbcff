"""What the executor knows of each sequence: ids and block tables, in arrays made once."""

from __future__ import annotations

from typing import Any

import numpy as np

from staffel.control.messages import Row
from staffel.model.attention import PackedStep


class Slots:
    """Arrays by slot; a batch only touches what it names."""

    def __init__(self, slots: int, max_model_len: int, block_size: int) -> None:
        self.ids = np.zeros((slots, max_model_len + 1), np.int32)
        """[slots, max_model_len + 1]: the one more is a token drawn in the last place."""
        self.lengths = np.zeros(slots, np.int64)
        """[slots]: ids known; 0: the slot is free."""
        self.tables = np.zeros((slots, -(-max_model_len // block_size)), np.int64)
        """[slots, blocks of a longest sequence]."""
        self.blocks = np.zeros(slots, np.int64)
        """[slots]: entries of `tables` in use."""
        self._block_size = block_size

    def enter(self, slot: int, ids: list[int]) -> None:
        """A sequence takes the slot; nothing is left of the one before."""
        self.ids[slot, : len(ids)] = ids
        self.lengths[slot] = len(ids)
        self.blocks[slot] = 0

    def leave(self, slot: int) -> None:
        self.lengths[slot] = 0

    def grow(self, slot: int, blocks: list[int]) -> None:
        """Append to the slot's block table."""
        used = self.blocks[slot]
        self.tables[slot, used : used + len(blocks)] = blocks
        self.blocks[slot] = used + len(blocks)

    def next_row(self, slot: int) -> Row:
        """The one position that is known but not computed; the token after it is drawn."""
        return Row(slot, int(self.lengths[slot]) - 1, 1, True)

    def append(self, slot: int, token: int) -> None:
        """The token after all known ones."""
        self.ids[slot, self.lengths[slot]] = token
        self.lengths[slot] += 1

    def pack(self, rows: list[Row]) -> tuple[PackedStep, np.ndarray[Any, Any]]:
        """What the rows compute, and its token ids, int32 [T].

        Raises:
            ValueError: a row goes beyond the ids or the blocks that are known of its slot.
        """
        for row in rows:
            self._check(row)
        slots = np.array([row.slot for row in rows])
        starts = np.array([row.start for row in rows])
        counts = np.array([row.count for row in rows])
        step = PackedStep(self.tables[slots], starts, counts)
        return step, self.ids[slots[step.owners], step.positions]

    def _check(self, row: Row) -> None:
        end = row.start + row.count
        known = min(self.lengths[row.slot], self.blocks[row.slot] * self._block_size)
        if row.count < 1 or end > known:
            raise ValueError(
                f"slot {row.slot}: positions {row.start} to {end} asked for, {known} known"
            )
        if row.sample and end != self.lengths[row.slot]:
            raise ValueError(f"slot {row.slot}: a token to draw at {end}, which is known already")
