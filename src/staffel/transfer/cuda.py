"""KV memory on a GPU, opened by processes of the same host through CUDA IPC handles.

The words that say which dispatch lives in which slot stay in host memory, shared as in `shm`: they
are written and read between steps, by the host. Copies run on a stream of their own, so that a
decode step that is in flight goes on beside them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import msgspec
import torch
from torch import Tensor

from staffel.config import ConfigError
from staffel.control.messages import KvRegion
from staffel.transfer.base import KvShape, Unreachable
from staffel.transfer.shm import SharedMemory, SharedPeer, words_bytes


class _Handle(msgspec.Struct, array_like=True):
    """What torch tells of a storage, in its order, for another process to open it."""

    device: int
    handle: bytes
    size: int
    offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    event_sync: bool


_own: WeakValueDictionary[bytes, CudaMemory] = WeakValueDictionary()
"""Of this process, by handles: CUDA opens none in the process that it is from."""


class CudaMemory:
    """The owner's side. A `KvMemory`."""

    def __init__(self, shape: KvShape, device: torch.device) -> None:
        """Raises ConfigError where the GPU lacks the memory."""
        self.words = SharedMemory(msgspec.structs.replace(shape, num_blocks=0))
        try:
            self.k, self.v = (_zeros(shape, width, device) for width in _widths(shape))
        except torch.cuda.OutOfMemoryError:
            self.words.close()
            raise ConfigError(
                f"--kv-memory: the GPU has no {shape.num_blocks * shape.block_bytes} bytes left "
                "for KV beside the weights and what else runs on it; give less, or a smaller "
                "--gpu-memory-utilization"
            ) from None
        self.region = msgspec.structs.replace(
            self.words.region,
            kind="cuda",
            num_blocks=shape.num_blocks,
            size=shape.num_blocks * shape.block_bytes,
            handle=msgspec.msgpack.encode([_share(part) for part in (self.k, self.v)]),
        )
        _own[self.region.handle] = self

    def set_generation(self, slot: int, dispatch: int) -> None:
        self.words.set_generation(slot, dispatch)

    def clear(self, slot: int) -> None:
        self.words.clear(slot)

    def close(self) -> None:
        if _own.pop(self.region.handle, None) is not None:
            self.words.close()
            del self.k, self.v


class CudaPeer:
    """The reader's side: another process's cache (or one of this process). A `Peer`."""

    def __init__(self, region: KvRegion, own: CudaMemory) -> None:
        words = msgspec.structs.replace(
            region, kind="shm", num_blocks=0, size=words_bytes(region.slots)
        )
        self._words = SharedPeer(words, own.words)
        self._k, self._v = _open(region, own)
        self._own_k, self._own_v = own.k, own.v
        self._stream = torch.cuda.Stream(own.k.device)
        self._copies: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        """Beginning and end of those whose time wasn't asked for yet."""

    def read_blocks(self, source_blocks: Sequence[int], blocks: Sequence[int]) -> None:
        # The own blocks may have been written by work that is still queued.
        self._stream.wait_stream(torch.cuda.current_stream(self._own_k.device))
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._copies.append((begin, end))
        with torch.cuda.stream(self._stream):
            begin.record()
            for theirs, ours in ((self._k, self._own_k), (self._v, self._own_v)):
                source, place = _ids(source_blocks, theirs), _ids(blocks, ours)
                taken = theirs.index_select(0, source).to(ours.device, non_blocking=True)
                ours.index_copy_(0, place, taken)
            end.record()

    def wait(self) -> None:
        self._stream.synchronize()

    def finish(self) -> float:
        self.wait()
        copies, self._copies = self._copies, []
        return sum(begin.elapsed_time(end) for begin, end in copies) / 1e3

    def confirm(self, slot: int, dispatch: int) -> bool:
        return self._words.confirm(slot, dispatch)

    def close(self) -> None:
        self.wait()
        del self._k, self._v, self._own_k, self._own_v
        self._words.close()


def _widths(shape: KvShape | KvRegion) -> tuple[int, int]:
    return shape.k_width, shape.v_width


def _sizes(shape: KvShape | KvRegion, width: int) -> tuple[int, ...]:
    return shape.num_blocks, shape.layers, shape.block_size, shape.kv_heads, width


def _zeros(shape: KvShape, width: int, device: torch.device) -> Tensor:
    return torch.zeros(_sizes(shape, width), dtype=shape.dtype, device=device)


def _share(tensor: Tensor) -> _Handle:
    handle = _Handle(*tensor.untyped_storage()._share_cuda_())
    # torch counts who has been told, and would keep the memory until that one has closed it. Here
    # the generation words say what is still whole, and the owner's end is the end of it.
    torch.UntypedStorage._release_ipc_counter_cuda(handle.counter, handle.counter_offset)
    return handle


def _open(region: KvRegion, own: CudaMemory) -> list[Tensor]:
    if region.pid == os.getpid():
        mine = _own.get(region.handle)
        if mine is None:
            raise Unreachable("the peer's KV memory is closed")
        return [mine.k, mine.v]
    handles = msgspec.msgpack.decode(region.handle, type=list[_Handle])
    try:
        return [
            _tensor(handle, _sizes(region, width), own.k.dtype)
            for handle, width in zip(handles, _widths(region), strict=True)
        ]
    except RuntimeError as error:  # as CUDA's own errors are
        raise Unreachable(f"cannot open the peer's KV memory: {error}") from None


def _tensor(handle: _Handle, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    arguments: tuple[Any, ...] = msgspec.structs.astuple(handle)
    storage = torch.UntypedStorage._new_shared_cuda(*arguments)
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, 0, sizes)


def _ids(blocks: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(list(blocks), dtype=torch.int64).to(like.device, non_blocking=True)
