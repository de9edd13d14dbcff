"""Moving KV blocks from one instance's memory to another's."""

from __future__ import annotations

from staffel.config import ConfigError
from staffel.control.messages import KvRegion
from staffel.transfer.base import KvMemory, KvShape, Peer, Unreachable
from staffel.transfer.shm import SharedMemory, SharedPeer

__all__ = ["KvMemory", "KvShape", "Peer", "Unreachable", "attach", "create"]

_PEERS = {"shm": SharedPeer}
_LAYOUT = ("kind", "layers", "block_size", "kv_heads", "k_width", "v_width", "dtype")


def create(shape: KvShape, kind: str = "shm") -> KvMemory:
    """Memory for a KV cache that peers can read.

    Raises:
        ConfigError: unknown `kind`, or not enough memory.
    """
    if kind != "shm":
        raise ConfigError(f"transfer: no way to share KV of kind {kind!r}; there is shm")
    return SharedMemory(shape)


def attach(region: KvRegion, own: KvMemory) -> Peer:
    """Open a peer's memory, so that its blocks can be copied into `own`.

    Raises:
        ConfigError: the two are laid out differently, or nothing here reads that kind.
        Unreachable: the peer is gone, or its memory can't be opened.
    """
    check_layout(region, own.region)
    if region.kind not in _PEERS:
        raise ConfigError(f"transfer: no way to read KV of kind {region.kind!r}; there is shm")
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
