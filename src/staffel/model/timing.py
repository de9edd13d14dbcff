"""What a process that measures and its owner say to each other: one JSON line per message."""

from __future__ import annotations

from msgspec import Struct

from staffel.config import InstanceSpec, ModelSpec
from staffel.control.messages import KvRegion
from staffel.model.shapes import BatchShape


class Setup(Struct, frozen=True, kw_only=True, tag=True):
    """The first line: load the model."""

    model: ModelSpec
    spec: InstanceSpec
    threads: int
    cores: tuple[int, ...] | None
    """None: any."""
    gpu_turn: tuple[int, int]
    """As `GpuUse` has them: its number among those on GPUs, and how many there are."""


class Measure(Struct, frozen=True, tag=True):
    """Time one step of that shape."""

    shape: BatchShape


class AttachPeer(Struct, frozen=True, tag=True):
    region: KvRegion


class Copy(Struct, frozen=True, tag=True):
    """Time a step that does nothing but copy so many blocks from the peer."""

    blocks: int


class Repeat(Struct, frozen=True, tag=True):
    """Compute that shape over and over until the next command; answered after the first time."""

    shape: BatchShape


class Rest(Struct, frozen=True, tag=True):
    """Do nothing."""


class Ready(Struct, frozen=True, tag=True):
    """The model is loaded."""

    region: KvRegion


class Took(Struct, frozen=True, tag=True):
    seconds: float


class Done(Struct, frozen=True, tag=True):
    pass


class Unfit(Struct, frozen=True, tag=True):
    """It can't be done; the text is for the user."""

    message: str


Command = Setup | Measure | AttachPeer | Copy | Repeat | Rest
Answer = Ready | Took | Done | Unfit
