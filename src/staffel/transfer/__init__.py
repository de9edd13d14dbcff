"""Moving KV blocks from one instance's memory to another's."""

from __future__ import annotations

import torch

from staffel.config import ConfigError
from staffel.control.messages import KvRegion
from staffel.transfer.base import KvMemory, KvShape, Peer, Unreachable
from staffel.transfer.cuda import CudaMemory, CudaPeer
from staffel.transfer.shm import SharedMemory, SharedPeer

__all__ = ["KvMemory", "KvShape", "Peer", "Unreachable", "attach", "create"]

_CPU = torch.device("cpu")
_PEERS = {"shm": SharedPeer, "cuda": CudaPeer}
_LAYOUT = ("kind", "layers", "block_size", "kv_heads", "k_width", "v_width", "dtype")


def create(shape: KvShape, device: torch.device = _CPU) -> KvMemory:
    """Memory on that device for a KV cache that peers can read.

    Raises:
        ConfigError: there is not enough memory.
    """
    return CudaMemory(shape, device) if device.type == "cuda" else SharedMemory(shape)


def attach(region: KvRegion, own: KvMemory) -> Peer:
    """Open a peer's memory, so that its blocks can be copied into `own`.

    Raises:
        ConfigError: the two are laid out differently, or nothing here reads that kind.
        Unreachable: the peer is gone, or its memory can't be opened.
    """
    check_layout(region, own.region)
    if region.kind not in _PEERS:
        known = ", ".join(_PEERS)
        raise ConfigError(f"transfer: no way to read KV of kind {region.kind!r}; there is {known}")
    return _PEERS[region.kind](region, own)


def check_layout(theirs: KvRegion, ours: KvRegion) -> None:
    """Raise ConfigError that names the first field in which the layouts differ."""
    for field in _LAYOUT:
        their, our = getattr(theirs, field), getattr(ours, field)
        if their != our:
            raise ConfigError(
                f"transfer: {field} is {their} in the peer's KV cache and {our} here; "
                "run the same model, dtype and block size on both"
            )
