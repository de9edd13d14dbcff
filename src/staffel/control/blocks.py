"""Paged KV memory as numbers: which block is free, which is shared, which still holds a prefix.

Knows hashes and block numbers, no tensors and no sequences.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence as Seq
from hashlib import blake2b


def block_hash(parent: bytes, ids: Seq[int]) -> bytes:
    """Names a full block by its ids and all before them.

    Keyed by content with a cryptographic hash: a collision would show one client's KV to another.
    """
    return blake2b(parent + array("q", ids).tobytes(), digest_size=16).digest()


def extend_hashes(hashes: list[bytes], ids: Seq[int], block_size: int, blocks: int) -> None:
    """Bring `hashes` up to the first `blocks` full blocks of `ids`, in place."""
    for i in range(len(hashes), blocks):
        parent = hashes[-1] if hashes else b""
        hashes.append(block_hash(parent, ids[i * block_size : (i + 1) * block_size]))


class BlockManager:
    """Allocation with reference counts and a prefix cache with LRU reuse.

    A block is free (holds nothing), in use (references > 0), or cached (no reference, kept under
    its hash until the memory is wanted).
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free: deque[int] = deque(range(num_blocks))
        self._references = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Blocks without reference that have a hash, least recently used first."""

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def available(self) -> int:
        """Blocks that can be taken: free ones, and cached ones that give way."""
        return len(self._free) + len(self._cached)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def match(self, hashes: Seq[bytes]) -> list[int]:
        """The blocks of the longest known prefix."""
        found = []
        for key in hashes:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def can_take(self, shared: Seq[int], fresh: int) -> bool:
        """Whether `fresh` blocks remain after the matched ones are held."""
        revived = sum(1 for block in shared if not self._references[block])
        return self.available - revived >= fresh

    def take(self, shared: Seq[int], fresh: int) -> list[int]:
        """Hold the matched blocks and `fresh` empty ones: a block table."""
        for block in shared:
            if not self._references[block]:
                del self._cached[block]
            self._references[block] += 1
        return [*shared, *(self._take_empty() for _ in range(fresh))]

    def register(self, block: int, key: bytes) -> None:
        """Name a block that is held by its content; the first block of a name keeps it."""
        if key not in self._block_of and self._hash_of[block] is None:
            self._block_of[key] = block
            self._hash_of[block] = key

    def release(self, blocks: Seq[int]) -> None:
        """Let go of a block table. Its tail is reused before its head, which more can share."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block]:
                continue
            if self._hash_of[block] is None:
                self._free.append(block)
            else:
                self._cached[block] = None

    def _take_empty(self) -> int:
        if self._free:
            block = self._free.popleft()
        else:
            block, _ = self._cached.popitem(last=False)
            key = self._hash_of[block]
            assert key is not None
            del self._block_of[key]
            self._hash_of[block] = None
        self._references[block] = 1
        return block
