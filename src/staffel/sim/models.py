"""What is simulated: instances and the link between them, by what they cost; and what is asked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from staffel.config import ConfigError, Policy, Role
from staffel.latency.model import LatencyModel
from staffel.latency.profile import Slowdown


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
    prefix_cache: bool = True
    pp: int = 1
    """Pipeline stages of equal length: so many batches are in flight."""
    devices: int = 1
    slowdown: Mapping[str, Mapping[str, Slowdown]] = field(default_factory=dict)
    """Of instances that share a host: what a step of a phase ("prefill", "decode", "mixed") takes
    longer beside an instance that computes "prefill" or "decode"."""


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


class HostCpu(NamedTuple):
    """CPU seconds that server and clients take from the cores of the instances, where they have
    none of their own."""

    request_s: float
    """For each request: one half when it comes, one when it ends."""
    step_s: float
    """For each step whose tokens go out."""
    token_s: float
    """For each token that goes out."""

    @classmethod
    def parse(cls, text: str, field: str) -> HostCpu:
        """From "7,1,0.07": milliseconds of each. Raises ConfigError naming `field`."""
        try:
            costs = [float(part) / 1e3 for part in text.split(",")]
        except ValueError:
            costs = []
        if len(costs) != len(cls._fields) or not all(0 <= cost < math.inf for cost in costs):
            raise ConfigError(
                f"{field}: {text!r} is not like 7,1,0.07: milliseconds for each request, each "
                "step and each token"
            )
        return cls(*costs)

    def seconds(self, tokens: int, requests: int) -> float:
        """For a step whose `tokens` go out, if there are any, and so many requests that come or
        end."""
        reported = self.step_s + self.token_s * tokens if tokens else 0.0
        return reported + self.request_s / 2 * requests


@dataclass(frozen=True, kw_only=True)
class Shell:
    """What the shell itself costs, in seconds, and what the router is told."""

    message_s: float = 0.0002
    """From an instance to the router, or back."""
    step_s: float = 0.0
    """What an instance's loop adds to each step."""
    request_s: float = 0.0
    """From a request's arrival to the router."""
    cpu: HostCpu | None = None
    """None: server and clients have cores of their own."""
    local_prefill_below: int = 0
    """As `staffel serve --local-prefill-below`."""
    max_queue: int = 1024
    """As `staffel serve --max-queue`."""
    window_tokens: int | None = None
    """Prompt tokens sent to an instance ahead of its work. None: as `staffel serve` has it."""


def shell_of(host_cpu: str | None) -> Shell:
    """What a command's --host-cpu says, if it is given. Raises ConfigError naming it."""
    return Shell() if host_cpu is None else Shell(cpu=HostCpu.parse(host_cpu, "--host-cpu"))


IDEAL = Shell(message_s=0.0)
"""A shell that costs nothing."""
