"""What was seen of each request, and what it means: the definitions of every measure.

Times are seconds on the run's clock: 0 is the start of the arrival schedule. Everything counts
from the *scheduled* arrival, so a client that sends late makes the server look worse, never
better; its lateness is reported apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from msgspec import Struct

from staffel.config import SLO

EMA_ALPHA = 0.1
"""Weight of the newest gap in the EMA latency: e = alpha * gap + (1 - alpha) * e."""

TokensFrom = Literal["ids", "logprobs", "usage", "text", "spread", "none"]
"""Where the number of tokens in each chunk comes from: ids or log probabilities in the chunk,
usage in the chunk (continuous), tokenising the text afterwards, the final usage spread evenly over
the chunks, or nowhere (no output, or a stream that was cut: chunks of 0 tokens)."""


class Chunk(Struct, frozen=True, array_like=True, gc=False):
    """One piece of output as it came. Chunks without content or token aren't among them."""

    at: float
    """When the bytes were read from the socket."""
    tokens: int


class Record(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request that was sent, whatever became of it."""

    index: int
    """Place in the arrival schedule."""
    scheduled: float
    sent: float
    """When its bytes were handed to the socket."""
    asked_tokens: int
    """Output tokens asked for (max_tokens)."""
    chunks: list[Chunk] = []
    ended: float | None = None
    """When the stream or its connection ended; None: it was still open when the run was cut."""
    prompt_tokens: int | None = None
    """As the server says; None: it doesn't."""
    output_tokens: int | None = None
    """As the server's usage says; None: it doesn't."""
    cached_tokens: int | None = None
    tokens_from: TokensFrom = "none"
    status: int | None = None
    """HTTP; None: no answer came."""
    finish: str | None = None
    error: str | None = None
    """Why it failed: a refusal, a broken or truncated stream, an error event, a time-out, output
    shorter than asked for. None: it went well."""

    @property
    def lateness(self) -> float:
        """How much later than scheduled it was sent."""
        return self.sent - self.scheduled

    @property
    def tokens(self) -> int:
        """Output tokens: the server's usage where there is one."""
        counted = sum(chunk.tokens for chunk in self.chunks)
        return counted if self.output_tokens is None else self.output_tokens

    @property
    def ttft(self) -> float | None:
        """Scheduled arrival to the first chunk with content or a token."""
        return self.chunks[0].at - self.scheduled if self.chunks else None

    @property
    def e2e(self) -> float | None:
        """Scheduled arrival to the last chunk with content or a token."""
        return self.chunks[-1].at - self.scheduled if self.chunks else None

    @property
    def tpot(self) -> float | None:
        """(last - first) / (tokens - tokens in the first chunk); None without tokens after it."""
        if not self.chunks:
            return None
        later = self.tokens - self.chunks[0].tokens
        return (self.chunks[-1].at - self.chunks[0].at) / later if later > 0 else None

    def gaps(self) -> Iterator[float]:
        """Inter-token latencies: a chunk's gap to the one before, spread over its tokens."""
        for before, chunk in zip(self.chunks, self.chunks[1:], strict=False):
            if chunk.tokens:
                yield from [(chunk.at - before.at) / chunk.tokens] * chunk.tokens

    @property
    def itl_p99(self) -> float | None:
        """99th percentile of the gaps (nearest rank)."""
        gaps = sorted(self.gaps())
        return gaps[-(-99 * len(gaps) // 100) - 1] if gaps else None

    @property
    def ema(self) -> float | None:
        """Largest value of the exponentially weighted mean of the gaps."""
        mean, largest = None, None
        for gap in self.gaps():
            mean = gap if mean is None else EMA_ALPHA * gap + (1 - EMA_ALPHA) * mean
            largest = mean if largest is None else max(largest, mean)
        return largest

    def missed(self, slo: SLO) -> list[str]:
        """The objectives that it missed. Empty: it met all.

        "failed" stands for a request that failed, "unfinished" for one that was still open when
        the run was cut. A measure that doesn't exist (TPOT of one token) can't be missed.
        """
        if self.error is not None or (self.ended is not None and not self.chunks):
            return ["failed"]
        if self.ended is None:
            return ["unfinished"]
        measures = ((name, getattr(self, name), bound) for name, bound in slo.bounds().items())
        return [name for name, value, bound in measures if value is not None and value > bound]
