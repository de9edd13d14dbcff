"""The router's nouns: an instance as it sees it, a request on its way, a handoff between two."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from staffel.control.affinity import PrefixIndex
from staffel.control.messages import (
    Attach,
    Cancel,
    Detach,
    HandoffReady,
    Hello,
    PullKv,
    Release,
    Renew,
    Start,
)
from staffel.control.request import Request, TokenLogprobs

Stage = Literal["queued", "prefill", "claimed", "reading", "decode"]


class Summary(Struct, frozen=True, kw_only=True):
    """What became of a request: one line of the log. Times are nanoseconds, None: not reached."""

    request: str
    outcome: str
    """"stop", "length", "cancelled", or the status of its failure."""
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    prefill_instance: str | None
    decode_instance: str | None
    losses: int
    """How often an instance died under it."""
    repeats: int
    """How often it went through prefill again."""
    failed_reads: int
    """Reads of its KV that failed, those before a good one not counted."""
    queue_ns: int | None
    """Arrival to the first batch, in the router and at the instance."""
    prefill_ns: int | None
    """First batch to the end of the prompt."""
    handoff_ns: int | None
    """KV pinned to KV confirmed on the decode side, waiting included."""
    read_ns: int | None
    """The part of it from when the decode side had blocks for it."""
    decode_ns: int | None
    """First token to the end."""
    total_ns: int


class Instance:
    """The router's view of one incarnation."""

    def __init__(self, hello: Hello) -> None:
        self.hello = hello
        self.name = hello.instance
        self.role = hello.role
        self.capacity = hello.region.num_blocks * hello.region.block_size
        self.index = PrefixIndex(hello.region.num_blocks if hello.prefix_cache else 0)
        self.jobs: dict[int, Job] = {}
        """By dispatch."""
        self.queued_tokens = 0
        """Prompt tokens sent there and not computed yet, as far as not cached."""
        self.held_tokens = 0
        """Tokens of the sequences that decode there."""
        self.suspects = 0
        """Of `jobs`, those that run there alone."""
        self.last_order = 0
        self.last_report = 0
        self.commands: list[Start | PullKv | Release | Cancel | Renew | Attach | Detach] = []
        """To go into the next order."""


class Handoff:
    """KV pinned on a prefill instance for a decode instance to read."""

    def __init__(self, source: Instance, ready: HandoffReady, now: int) -> None:
        self.source = source
        self.ready = ready
        self.pinned_at = now
        self.retried = False


SUSPECT_LOSSES = 2
"""A request that has cost so many instances may be what kills them: it runs only alone."""


class Job:
    """A request in the router."""

    def __init__(self, request: Request, number: int, now: int) -> None:
        self.request = request
        self.number = number
        """In order of arrival."""
        self.arrival = now
        self.stage: Stage = "queued"
        self.emitted: list[int] = []
        self.instance: Instance | None = None
        self.dispatch = 0
        self.handoff: Handoff | None = None
        self.hashes: list[bytes] | None = None
        self.queued_tokens = 0
        """Its part of the instance's."""
        self.held = False
        """Whether its tokens are among the instance's."""
        self.alone = False
        """Whether it is among the instance's `suspects`."""
        self.losses = 0
        self.repeats = 0
        self.failed_reads = 0
        """In a row."""
        self.cached_tokens = 0
        self.prompt_logprobs: list[TokenLogprobs] | None = None
        self.prefill_instance: str | None = None
        self.decode_instance: str | None = None
        self.dispatched_at: int | None = None
        self.queue_ns: int | None = None
        self.prefill_ns: int | None = None
        self.handoff_ns: int | None = None
        self.read_ns: int | None = None
        self.first_token_at: int | None = None

    @property
    def group(self) -> str:
        """The client request that it is a choice of."""
        return self.request.group or self.request.id

    @property
    def suspect(self) -> bool:
        return self.losses >= SUSPECT_LOSSES

    @property
    def length(self) -> int:
        return len(self.request.prompt) + len(self.emitted)

    @property
    def most_tokens(self) -> int:
        return len(self.request.prompt) + self.request.params.max_tokens


def summarise(job: Job, outcome: str, now: int) -> Summary:
    first = job.first_token_at
    return Summary(
        request=job.request.id,
        outcome=outcome,
        prompt_tokens=len(job.request.prompt),
        output_tokens=len(job.emitted),
        cached_tokens=job.cached_tokens,
        prefill_instance=job.prefill_instance,
        decode_instance=job.decode_instance,
        losses=job.losses,
        repeats=job.repeats,
        failed_reads=job.failed_reads,
        queue_ns=job.queue_ns,
        prefill_ns=job.prefill_ns,
        handoff_ns=job.handoff_ns,
        read_ns=job.read_ns,
        decode_ns=now - first if first is not None else None,
        total_ns=now - job.arrival,
    )
