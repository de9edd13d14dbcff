"""What is simulated: instances and the link between them, by what they cost; and what is asked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from staffel.config import Policy, Role
from staffel.latency.model import LatencyModel


@dataclass(frozen=True, kw_only=True)
class InstanceModel:
    """One instance: its settings, as the live one has them, and what its steps cost."""

    role: Role
    latency: LatencyModel
    """Seconds of a whole step, through all pipeline stages."""
    kv_tokens: int
    """Tokens that its KV cache holds."""
    chunk_tokens: int = 256
    policy: Policy = "chunked"
    max_sequences: int = 128
    block_size: int = 16
    pp: int = 1
    """Pipeline stages of equal length: so many batches are in flight."""
    devices: int = 1
    slowdown: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Of instances that share a host: how many times longer a step of a phase ("prefill",
    "decode", "mixed") takes beside an instance that computes "prefill" or "decode"."""


@dataclass(frozen=True)
class LinkModel:
    """What a decode instance's read of KV costs. Each decode instance has a link of its own."""

    bytes_per_second: float
    fixed_s: float
    """Of each run of blocks that a step reads."""
    kv_bytes_per_token: int
    beside: bool = False
    """False: the read is a part of the decode instance's step, which is longer by it (a CPU, where
    whoever copies takes memory bandwidth from the step). True: it is done beside the step by an
    engine of its own (a GPU): a step lasts as long as the longer one of the two, and reads what
    the link carries in an ordinary step."""

    def seconds(self, tokens: int) -> float:
        """To read the KV of so many tokens at once."""
        return self.fixed_s + tokens * self.kv_bytes_per_token / self.bytes_per_second


FREE = LinkModel(bytes_per_second=math.inf, fixed_s=0.0, kv_bytes_per_token=1)
"""KV arrives in no time."""


class Arrival(NamedTuple):
    """One request. Prompts with equal `prefix` ids, or `shared` tokens, begin alike."""

    at_ns: int
    prompt_tokens: int
    output_tokens: int
    prefix: tuple[int, ...] = ()
    """Ids of the prompt's leading blocks."""
    block: int = 512
    """Tokens of one of them."""
    shared: int = 0
    """Leading tokens that all requests have in common, before the blocks."""

    @property
    def shares(self) -> bool:
        """Whether a prefix cache may know a part of its prompt."""
        return bool(self.prefix or self.shared)


@dataclass(frozen=True, kw_only=True)
class Shell:
    """What the shell itself costs, in seconds, and what the router is told."""

    message_s: float = 0.0002
    """From an instance to the router, or back."""
    step_s: float = 0.0
    """What an instance's loop adds to each step."""
    request_s: float = 0.0
    """From a request's arrival to the router."""
    token_cpu_s: float = 0.0
    """CPU time, for each token that goes out, which server and clients take from the cores of the
    instances, where they have none of their own."""
    local_prefill_below: int = 0
    """As `staffel serve --local-prefill-below`."""
    max_queue: int = 1024
    """As `staffel serve --max-queue`."""
    window_tokens: int | None = None
    """Prompt tokens sent to an instance ahead of its work. None: as `staffel serve` has it."""


IDEAL = Shell(message_s=0.0)
"""A shell that costs nothing."""
