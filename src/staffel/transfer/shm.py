"""KV memory that processes of one host share: an anonymous file, opened by peers through /proc.

An anonymous file (memfd) has no name that could be left behind: the memory returns with the
last mapping, however its owner ended. Nor is it bound by the size of /dev/shm.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray

from staffel.config import ConfigError
from staffel.control.messages import KvRegion
from staffel.transfer.base import KvMemory, KvShape, Unreachable

_NAME = "staffel-kv"
_WORD = 8


def words_bytes(slots: int) -> int:
    """Of a region, what its generation words take: whole pages."""
    return -(-slots * _WORD // mmap.PAGESIZE) * mmap.PAGESIZE


class _Layout:
    """Where things lie in a region, in bytes."""

    def __init__(self, slots: int, num_blocks: int, k_block: int, v_block: int) -> None:
        self.slots = slots
        self.num_blocks = num_blocks
        self.k_block = k_block
        self.v_block = v_block
        self.k = words_bytes(slots)
        self.v = self.k + num_blocks * k_block
        self.size = self.v + num_blocks * v_block

    @classmethod
    def of(cls, region: KvRegion) -> _Layout:
        row = region.layers * region.block_size * region.kv_heads
        row *= getattr(torch, region.dtype).itemsize
        return cls(region.slots, region.num_blocks, row * region.k_width, row * region.v_width)

    def words(self, memory: mmap.mmap) -> NDArray[np.int64]:
        """The generation words: int64 [slots]."""
        return np.frombuffer(memory, np.int64, self.slots)

    def blocks(self, memory: mmap.mmap) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """The bytes of K and of V: uint8 [num_blocks, bytes of a block]."""
        k = np.frombuffer(memory, np.uint8, self.num_blocks * self.k_block, self.k)
        v = np.frombuffer(memory, np.uint8, self.num_blocks * self.v_block, self.v)
        sizes = (self.num_blocks, self.k_block), (self.num_blocks, self.v_block)
        return k.reshape(sizes[0]), v.reshape(sizes[1])


class SharedMemory:
    """The owner's side. A `KvMemory`."""

    def __init__(self, shape: KvShape) -> None:
        layout = _Layout(shape.slots, shape.num_blocks, shape.k_block_bytes, shape.v_block_bytes)
        self._fd = _allocate(layout.size)
        memory = mmap.mmap(self._fd, layout.size)
        self._words = layout.words(memory)
        k, v = layout.blocks(memory)
        self.k = _tensor(k, shape, shape.k_width)
        self.v = _tensor(v, shape, shape.v_width)
        self.region = KvRegion(
            kind="shm",
            pid=os.getpid(),
            fd=self._fd,
            size=layout.size,
            slots=shape.slots,
            num_blocks=shape.num_blocks,
            layers=shape.layers,
            block_size=shape.block_size,
            kv_heads=shape.kv_heads,
            k_width=shape.k_width,
            v_width=shape.v_width,
            dtype=str(shape.dtype).removeprefix("torch."),
        )

    def set_generation(self, slot: int, dispatch: int) -> None:
        self._words[slot] = dispatch

    def clear(self, slot: int) -> None:
        self._words[slot] = 0

    def close(self) -> None:
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd = -1
        # The mapping goes with the last view of it: dropping the views is what unmaps.
        del self._words, self.k, self.v


class SharedPeer:
    """The reader's side: another process's region (or this one's), mapped read-only. A `Peer`."""

    def __init__(self, region: KvRegion, own: KvMemory) -> None:
        layout = _Layout.of(region)
        memory = _map_peer(region, layout.size)
        self._own_k, self._own_v = _bytes(own.k), _bytes(own.v)
        self._words = layout.words(memory)
        self._k, self._v = layout.blocks(memory)
        self._copied_s = 0.0

    def read_blocks(self, source_blocks: Sequence[int], blocks: Sequence[int]) -> None:
        started = perf_counter()
        # One memmove per block: fancy indexing over blocks is many times slower.
        for source, block in zip(source_blocks, blocks, strict=True):
            self._own_k[block] = self._k[source]
            self._own_v[block] = self._v[source]
        self._copied_s += perf_counter() - started

    def wait(self) -> None:
        pass  # it was done at once

    def finish(self) -> float:
        seconds, self._copied_s = self._copied_s, 0.0
        return seconds

    def confirm(self, slot: int, dispatch: int) -> bool:
        return int(self._words[slot]) == dispatch

    def close(self) -> None:
        del self._words, self._k, self._v, self._own_k, self._own_v


def _tensor(data: NDArray[np.uint8], shape: KvShape, width: int) -> torch.Tensor:
    sizes = (shape.num_blocks, shape.layers, shape.block_size, shape.kv_heads, width)
    return torch.from_numpy(data).view(shape.dtype).view(sizes)


def _bytes(blocks: torch.Tensor) -> NDArray[np.uint8]:
    """uint8 [num_blocks, bytes of a block], the same memory."""
    return blocks.flatten(1).view(torch.uint8).numpy()


def _allocate(size: int) -> int:
    """A file descriptor of `size` bytes of zeroed memory that is really there."""
    # Linux would hand out what it can and kill a process when that runs dry: look first.
    if size > _memory_left():
        raise ConfigError(
            f"--kv-memory: {size} bytes for an instance, and the machine has {_memory_left()} "
            "left; give less, or run fewer instances"
        )
    fd = os.memfd_create(_NAME)
    try:
        os.ftruncate(fd, size)
        # Without this a lack of memory shows later, as a SIGBUS in the middle of a step.
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        os.close(fd)
        raise ConfigError(
            f"--kv-memory: cannot get {size} bytes of memory ({error.strerror}); give less"
        ) from None
    return fd


def _memory_left(root: Path = Path("/")) -> int:
    """Bytes that can still be had on this machine, and in this container."""
    lines = (root / "proc/meminfo").read_text().splitlines()
    left = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    groups = root / "sys/fs/cgroup"
    second = _left_in_group(groups, "memory.max", "memory.current", "inactive_file")
    first = _left_in_group(
        groups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    )
    return int(min(left, first, second))


def _left_in_group(folder: Path, limit: str, usage: str, reclaimable: str) -> float:
    """What a control group may still take: its limit less what is in use and can't be dropped.

    Version 2 and version 1 differ in the names of the files (Linux, admin-guide/cgroup-v2, Memory).
    """
    try:
        most = (folder / limit).read_text().strip()
        used = int((folder / usage).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:  # no such group
        return math.inf
    if most == "max":
        return math.inf
    return max(0, int(most) - used + int(stat.get(reclaimable, 0)))


def _map_peer(region: KvRegion, size: int) -> mmap.mmap:
    path = f"/proc/{region.pid}/fd/{region.fd}"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        why = f"cannot open the peer's KV memory: {error.strerror}"
        raise Unreachable(error.errno, why, path) from None
    try:
        if not _is_kv(fd) or not os.fstat(fd).st_size == region.size == size:
            raise Unreachable(f"{path} is not the KV memory that the peer announced")
        return mmap.mmap(fd, size, prot=mmap.PROT_READ)
    finally:
        os.close(fd)


def _is_kv(fd: int) -> bool:
    """Whether it is KV memory at all: a process number is used again after its process is gone."""
    return os.readlink(f"/proc/self/fd/{fd}").startswith(f"/memfd:{_NAME}")
