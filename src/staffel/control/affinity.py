"""What the router knows of the instances' prefix caches: what it sent where."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq

from staffel.control.blocks import extend_hashes


def prompt_hashes(prompt: Seq[int], block_size: int) -> list[bytes]:
    """Names of the full blocks that a prompt can share; its last token is always computed."""
    hashes: list[bytes] = []
    extend_hashes(hashes, prompt, block_size, (len(prompt) - 1) // block_size)
    return hashes


class PrefixIndex:
    """The block names last sent to an instance, as many as it has blocks."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._known: OrderedDict[bytes, None] = OrderedDict()

    def matched(self, hashes: Seq[bytes]) -> int:
        """How many leading blocks are known."""
        count = 0
        for key in hashes:
            if key not in self._known:
                break
            count += 1
        return count

    def add(self, hashes: Seq[bytes]) -> None:
        """Remember, most recent last; the head of a prompt outlives its tail."""
        for key in reversed(hashes):
            self._known[key] = None
            self._known.move_to_end(key)
        while len(self._known) > self._capacity:
            self._known.popitem(last=False)
