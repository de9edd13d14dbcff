"""Every command and event that crosses a process edge.

Three edges: the router commands instances (`Command`, carried in an `Order`), instances report
to the router (`Event`, carried in a `Report`, one per step), and an engine hands batches to its
executor (`Batch`, answered by `BatchResult`). What the router tells the API is `Delta` and
`Failure`, and `Deltas` for many at once.

What happens once per token is said in columns, lists that belong together place by place: one
message per step, whatever the number of sequences.

A **dispatch** is one assignment of a request to an instance. Its number is unique and rising
over the router's life; it is the handoff's generation. Every command and event names it, and an
envelope names the incarnation that it is meant for or comes from, and its own rising number:
that is how stale and doubled messages are recognised.
"""

from __future__ import annotations

from msgspec import Struct

from staffel.config import Policy, Role
from staffel.control.request import FinishReason, Request, SamplingParams, TokenLogprobs

# ---- memory that peers read


class KvRegion(Struct, frozen=True, kw_only=True):
    """Where an instance's KV cache lies and how it is laid out; both sides of a transfer compare.

    Of kind "shm", the memory holds `slots` 64-bit words first (the dispatch that lives in each
    slot, 0: none), padded to a page; then K, then V, each [num_blocks, layers, block_size,
    kv_heads, width]. Of kind "cuda" it holds the words alone; K and V are on the GPU.
    """

    kind: str
    """The transfer that can read it: "shm" or "cuda"."""
    pid: int
    fd: int
    size: int
    """Bytes of K and V, with "shm" of the words too."""
    slots: int
    num_blocks: int
    layers: int
    block_size: int
    kv_heads: int
    k_width: int
    v_width: int
    dtype: str
    handle: bytes = b""
    """Of kind "cuda": what opens K and V in another process."""


# ---- router to instance


class Start(Struct, frozen=True, tag=True):
    """Compute the KV of prompt + emitted ids and go on from there."""

    dispatch: int
    request: Request
    emitted: list[int]
    """Output ids that the client has already: the sequence goes on after them."""
    handoff: bool
    """True: sample one token, pin the blocks and wait. False: go on to the end."""


class PullKv(Struct, frozen=True, tag=True):
    """Read the KV of a pinned sequence from its prefill instance, and decode from there."""

    dispatch: int
    request: Request
    emitted: list[int]
    source: str
    source_incarnation: int
    source_dispatch: int
    source_slot: int
    blocks: list[int]
    tokens: int


class Release(Struct, frozen=True, tag=True):
    """Unpin the sequence of that dispatch."""

    dispatch: int


class Cancel(Struct, frozen=True, tag=True):
    """Drop whatever that dispatch brought; answered by `Ended` when nothing is left of it."""

    dispatch: int


class Renew(Struct, frozen=True, tag=True):
    """Extend the leases of these pinned dispatches."""

    dispatches: list[int]


Command = Start | PullKv | Release | Cancel | Renew


class Attach(Struct, frozen=True, tag=True):
    """For the shell: map a peer's KV region, so that it can be read."""

    instance: str
    incarnation: int
    region: KvRegion


class Detach(Struct, frozen=True, tag=True):
    """For the shell: a peer is gone; unmap its region."""

    instance: str
    incarnation: int


class Order(Struct, frozen=True):
    """One message to an instance."""

    incarnation: int
    number: int
    commands: list[Start | PullKv | Release | Cancel | Renew | Attach | Detach]


# ---- instance to router


class Tokens(Struct, frozen=True, tag=True):
    """New output tokens of a sequence."""

    dispatch: int
    index: int
    """Place of the first of `ids` among the request's output tokens."""
    ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish: FinishReason | None = None
    """Set with the last ones; the instance has let go of the sequence then."""


class Decoded(Struct, frozen=True, tag=True):
    """One more output token for each of several sequences that go on after it: columns."""

    dispatches: list[int]
    indices: list[int]
    """Place of each token among its request's output tokens."""
    ids: list[int]


class Prefilled(Struct, frozen=True, tag=True):
    """The prompt is computed. Comes with, and before, the first token."""

    dispatch: int
    cached_tokens: int
    queued_ns: int
    """From arrival at the instance to the first batch."""
    compute_ns: int
    """From the first batch to the last of the prompt."""
    prompt_logprobs: list[TokenLogprobs] | None = None


class HandoffReady(Struct, frozen=True, tag=True):
    """The sequence is pinned: its blocks hold the KV of `tokens` tokens."""

    dispatch: int
    slot: int
    blocks: list[int]
    tokens: int


class PullStarted(Struct, frozen=True, tag=True):
    """Blocks were found; the read begins."""

    dispatch: int


class Pulled(Struct, frozen=True, tag=True):
    """The read is complete and was confirmed: the source may unpin."""

    dispatch: int
    read_ns: int
    """From when blocks were found to the confirmation."""


class PullFailed(Struct, frozen=True, tag=True):
    """The read failed or its generation was gone; nothing of it is used or kept."""

    dispatch: int


class Preempted(Struct, frozen=True, tag=True):
    """The sequence had to go for want of blocks; nothing of it is kept."""

    dispatch: int


class Failed(Struct, frozen=True, tag=True):
    """The sequence can't go on, here or elsewhere, for what was asked of it; nothing of it is
    kept."""

    dispatch: int
    message: str


class Ended(Struct, frozen=True, tag=True):
    """Answer to `Cancel`, and notice of an expired lease: nothing is left of the dispatch."""

    dispatch: int


Event = (
    Decoded
    | Tokens
    | Prefilled
    | HandoffReady
    | PullStarted
    | Pulled
    | PullFailed
    | Preempted
    | Failed
    | Ended
)


class Load(Struct, frozen=True, array_like=True):
    """An instance's state after a step, for metrics."""

    running: int
    waiting: int
    pinned: int
    free_blocks: int
    """Blocks that hold nothing."""
    cached_blocks: int
    """Blocks that nobody uses, kept for prefix hits."""
    total_blocks: int
    preemptions: int
    started: int
    """Dispatches that ever ran here."""
    copied_bytes: int
    """Of KV, ever read from other instances."""
    copied_seconds: float
    """Seconds that it took to copy them."""


class Report(Struct, frozen=True, tag=True):
    """One message from an instance: everything since the last one."""

    instance: str
    incarnation: int
    number: int
    events: list[Event]
    load: Load


class Hello(Struct, frozen=True, kw_only=True, tag=True):
    """The first message of an instance: it is ready to serve."""

    instance: str
    incarnation: int
    role: Role
    region: KvRegion
    prefix_cache: bool = True


class Unable(Struct, frozen=True, tag=True):
    """An instance can't start; the text is for the user."""

    instance: str
    incarnation: int
    message: str


class Beat(Struct, frozen=True, tag=True):
    """A sign of life, several in each --hang-timeout, from a thread that computes nothing."""

    instance: str
    incarnation: int
    turns: int
    """How often the instance's loop has gone round: it does so twice a second at least, unless a
    step takes longer. Where it stands still, so does the instance."""


FromInstance = Hello | Report | Unable | Beat


# ---- engine to executor


class Enter(Struct, frozen=True, array_like=True):
    """A sequence takes a slot."""

    slot: int
    dispatch: int
    ids: list[int]
    """All ids known: prompt and emitted."""
    prompt_len: int
    params: SamplingParams


class Row(Struct, frozen=True, array_like=True):
    """A prompt's share of a batch: compute positions start .. start + count."""

    slot: int
    start: int
    count: int
    sample: bool
    """Whether to draw the token after the last position."""


class ReadChunk(Struct, frozen=True, array_like=True):
    """Copy blocks of a peer into the own cache: `source_blocks[i]` to `blocks[i]`."""

    source: str
    source_incarnation: int
    source_blocks: list[int]
    blocks: list[int]
    confirm: tuple[int, int] | None
    """After the copy: the source's slot, and the dispatch that must still live there."""


class Batch(Struct, frozen=True, array_like=True):
    """What one step does, in this order: leaves, enters, grown, reads; then decodes and rows.

    All that is computed writes its KV before any reads it, layer by layer, so a row may use blocks
    that an earlier row of the same batch fills.
    """

    id: int
    leaves: list[int]
    """Slots that are free now; their generation word is cleared."""
    enters: list[Enter]
    """Slots that are taken now; their generation word is set."""
    grown: list[tuple[int, list[int]]]
    """Slots, and the blocks to append to their block tables."""
    reads: list[ReadChunk]
    decodes: list[int]
    """Slots whose last known token is computed, and the token after it drawn."""
    rows: list[Row]


class RowResult(Struct, frozen=True, array_like=True):
    """What a row gave; `token` is None where nothing was drawn."""

    token: int | None = None
    logprobs: TokenLogprobs | None = None
    grammar_ended: bool = False
    """The grammar admits nothing after `token`."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Of the prompt tokens at positions start + 1 .. start + count, as far as asked for."""
    failure: str | None = None
    """Why the grammar can't be followed any further; `token` is no part of the output then."""


class BatchResult(Struct, frozen=True, array_like=True):
    """Answers to a batch, in its order."""

    rows: list[RowResult]
    reads: list[bool]
    """Whether each read succeeded and, where asked, was confirmed."""
    tokens: list[int] = []
    """Drawn for the decodes."""
    details: dict[int, RowResult] = {}
    """By place among the decodes, where there is more to say than the token."""
    copied_bytes: int = 0
    """Of KV, by the reads."""
    copied_s: float = 0.0
    """Seconds that they took; on a GPU beside the step."""


# ---- router to API


class Delta(Struct, frozen=True, tag=True):
    """News of a request for its client."""

    request: str
    index: int
    """Place of the first of `ids` among the output tokens."""
    ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish: FinishReason | None = None
    cached_tokens: int | None = None
    """Set with the first delta: prompt tokens found in the prefix cache."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Set with the first delta where asked for; the first entry belongs to prompt token 1."""


class Deltas(Struct, frozen=True, tag=True):
    """One more token for each of several requests that go on after it: columns of what would be
    a `Delta` each."""

    requests: list[str]
    indices: list[int]
    ids: list[int]


class Failure(Struct, frozen=True, tag=True):
    """A request that won't be answered, or not to its end."""

    request: str
    status: int
    """HTTP: 400 (what was asked can't be followed to its end), 429 or 503 (try later), 504
    (--request-timeout)."""
    message: str
    retry_after: int | None = None
    """Seconds."""


UNAVAILABLE_RETRY_S = 5
"""When to try again where nobody can say how long it takes: a start, or the loss of a phase."""


# ---- what cores are made with

LEASE_NS = 30 * 10**9
"""How long a prefill instance keeps pinned KV without hearing from the router."""

READ_BYTES_PER_STEP = 16 << 20
"""Most bytes of KV that a step copies while sequences decode: about 2 ms of memory traffic."""


def read_blocks(bytes_per_block: int) -> int:
    """Blocks of that size that a step reads while sequences decode."""
    return max(1, READ_BYTES_PER_STEP // bytes_per_block)


def window_tokens(chunk_tokens: int, stages: int = 1) -> int:
    """Prompt tokens to send ahead to an instance: a chunk for each stage and one more, twice, so
    that it never waits for the router; 4096 at least."""
    return max(4096, 2 * chunk_tokens * (stages + 1))


class EngineConfig(Struct, frozen=True, kw_only=True):
    """Everything that an EngineCore decides by."""

    instance: str
    incarnation: int
    role: Role
    policy: Policy
    num_blocks: int
    block_size: int
    max_sequences: int
    chunk_tokens: int
    """Most prompt tokens of one step, less one for each sequence that decodes in it; a prompt
    that is longer is computed in chunks."""
    read_blocks: int
    """Most blocks that a step reads from peers while sequences decode here."""
    lease_ns: int
    prefix_cache: bool = True
    stages: int = 1
    """Pipeline stages. Above 1 the next token of a sequence can't be scheduled before the last one
    is known, so the running sequences are dealt to so many batches in flight."""


class RouterConfig(Struct, frozen=True, kw_only=True):
    """Everything that a RouterCore decides by."""

    block_size: int
    lease_ns: int
    local_prefill_below: int = 0
    """Prompts with fewer uncached tokens are prefilled on a decode instance; 0: none."""
    window_tokens: int = 4096
    """Prompt tokens sent to an instance ahead of its work; the rest waits in the router."""
    max_queue: int = 1024
    """Most requests that wait in the router."""
    request_timeout_ns: int = 0
    """0: none."""
