"""The nouns of a request: what a client asks for, and its state inside an instance."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

FinishReason = Literal["stop", "length"]


class SamplingParams(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are chosen and where the output ends. Set by the API, complete and validated."""

    max_tokens: int
    """Most output tokens; 0 only scores the prompt."""
    min_tokens: int = 0
    """`stop_ids` can't be drawn before this many output tokens."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    min_p: float = 0.0
    seed: int = 0
    """64 bits. With `choice` and the token's position it determines every draw."""
    choice: int = 0
    """Which of a request's n choices this is."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    stop_ids: tuple[int, ...] = ()
    """Ids that end the output, the model's end-of-sequence ids included unless ignored."""
    logprobs: int | None = None
    """None: no log probabilities; k: of the drawn token and of the k likeliest."""
    prompt_logprobs: int | None = None
    """The same of every prompt token but the first."""
    grammar: str | None = None
    """llguidance's grammar text that the output must follow."""


class Request(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One choice of one client request: token ids in, token ids out."""

    id: str
    prompt: list[int]
    params: SamplingParams
    group: str = ""
    """The client request; choices of several take turns. Empty: it is the only one of its own."""
    use_cache: bool = True
    """Whether prefix-cache hits may stand in for computing the prompt."""


class TokenLogprobs(Struct, frozen=True, array_like=True):
    """Natural-log probabilities at one position, of the model's raw distribution."""

    token: int
    logprob: float
    rank: int
    """1 is the likeliest."""
    top: list[tuple[int, float]]
    """The likeliest ids, best first."""


class Sequence:
    """A request inside an instance: token ids, block table, progress.

    A position is *scheduled* when a batch that computes its KV has been handed out. The token
    after the last scheduled position is being drawn: its place is known, its id is not.
    """

    __slots__ = (
        "arrival",
        "blocks",
        "cached_tokens",
        "dispatch",
        "first_scheduled",
        "handoff",
        "hashes",
        "ids",
        "last_batch",
        "limit",
        "most_ids",
        "over",
        "prefilled",
        "prompt_len",
        "pull",
        "registered",
        "request",
        "scheduled",
        "scores",
        "slot",
        "stop_ids",
    )

    def __init__(
        self, dispatch: int, request: Request, emitted: list[int], *, handoff: bool, now: int
    ) -> None:
        self.dispatch = dispatch
        """The number of the router's dispatch that brought it here."""
        self.request = request
        self.ids = request.prompt + emitted
        """Prompt and committed output."""
        self.prompt_len = len(request.prompt)
        self.most_ids = self.prompt_len + request.params.max_tokens
        self.stop_ids = request.params.stop_ids
        self.handoff = handoff
        """Whether to stop after the first token and hand the KV over."""
        self.arrival = now
        self.first_scheduled = 0
        """When its first batch was handed out; 0: not yet."""
        self.prefilled = False
        """Whether all of `ids` but the last is computed, here or by the instance pulled from."""
        self.scores: list[TokenLogprobs] = []
        """Of the prompt's tokens, where asked for, as far as computed."""
        self.cached_tokens = 0
        """Prompt tokens found in the prefix cache at its first admission here."""
        self.slot = -1
        """The executor's slot; -1: none."""
        self.blocks: list[int] = []
        """The block table."""
        self.hashes: list[bytes] = []
        """Chained hashes of the full blocks of `ids`, as far as they have been needed."""
        self.registered = 0
        """How many of `blocks` the prefix cache has been offered."""
        self.scheduled = 0
        self.limit = 0
        """While it decodes: up to where it can be scheduled without a thought, by its blocks and
        `most_ids`. 0 once it is over."""
        self.last_batch = 0
        """The last batch that names it; its blocks and slot stay until that has landed."""
        self.pull: Pull | None = None
        """The read that fills its blocks, until that is confirmed."""
        self.over = False
        """Ended, cancelled or preempted: results still in flight are dropped."""

    @property
    def outputs(self) -> int:
        """Committed output tokens, those before this instance included."""
        return len(self.ids) - self.prompt_len


class Pull:
    """A read of another instance's blocks, from the sequence's head, chunk by chunk."""

    __slots__ = (
        "blocks",
        "scheduled",
        "source",
        "source_dispatch",
        "source_incarnation",
        "source_slot",
        "tokens",
    )

    def __init__(
        self,
        *,
        source: str,
        source_incarnation: int,
        source_dispatch: int,
        source_slot: int,
        blocks: list[int],
        tokens: int,
    ) -> None:
        self.source = source
        self.source_incarnation = source_incarnation
        self.source_dispatch = source_dispatch
        self.source_slot = source_slot
        self.blocks = blocks
        """The source's block table."""
        self.tokens = tokens
        """Tokens whose KV the blocks hold."""
        self.scheduled = 0
        """Blocks of `blocks` that are read, being read, or found in the own cache."""
