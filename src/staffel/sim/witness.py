"""Watches a simulation as a client would, and writes the benchmark's records."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from staffel.bench.records import Chunk, Record
from staffel.control.messages import Delta, Deltas, Failure
from staffel.sim.models import Arrival


class Witness:
    """Hears the router's news and keeps what the measures need."""

    def __init__(
        self,
        arrivals: Sequence[Arrival],
        token_times: bool,
        stop: Callable[[Record], bool] | None,
    ) -> None:
        self.shares = any(arrival.shares for arrival in arrivals)
        """Whether a prefix cache could find anything."""
        self.satisfied = False
        """Nobody wants to see more."""
        self._arrivals = arrivals
        self._stop = stop
        self._sent: list[int] = []
        """When; they are sent in their order."""
        self._first: dict[int, int] = {}
        self._times: dict[int, list[Chunk]] | None = {} if token_times else None
        self._ended: dict[int, Record] = {}

    def sent(self, number: int, now: int) -> None:
        self._sent.append(now)

    def hear(self, news: Sequence[Delta | Deltas | Failure], now: int) -> int:
        """Take note; how many requests ended with it."""
        before = len(self._ended)
        for one in news:
            if isinstance(one, Deltas):
                if self._times is not None:
                    for request in one.requests:
                        self._token(int(request), 1, now)
            elif isinstance(one, Failure):
                self._end(int(one.request), now, one)
            else:
                self._delta(one, now)
        return len(self._ended) - before

    def _delta(self, delta: Delta, now: int) -> None:
        number = int(delta.request)
        if delta.index == 0:
            self._first[number] = now
        if self._times is not None and delta.ids:
            self._token(number, len(delta.ids), now)
        if delta.finish is not None:
            self._end(number, now, None)

    def _token(self, number: int, tokens: int, now: int) -> None:
        assert self._times is not None
        self._times.setdefault(number, []).append(Chunk(now / 1e9, tokens))

    def _end(self, number: int, now: int, failure: Failure | None) -> None:
        record = self._ended[number] = self._record(number, now, failure)
        if self._stop is not None and self._stop(record):
            self.satisfied = True
        self.satisfied |= len(self._ended) == len(self._arrivals)

    def records(self) -> list[Record]:
        """Of all that was sent; open ones as far as they came."""
        return [
            self._ended.get(number) or self._record(number, None, None)
            for number in range(len(self._sent))
        ]

    def _record(self, number: int, ended: int | None, failure: Failure | None) -> Record:
        arrival = self._arrivals[number]
        at = self._sent[number] / 1e9
        answered = ended is not None and failure is None
        return Record(
            index=number,
            scheduled=at,
            sent=at,
            asked_tokens=arrival.output_tokens,
            chunks=self._chunks(number, ended if answered else None),
            ended=None if ended is None else ended / 1e9,
            prompt_tokens=arrival.prompt_tokens,
            output_tokens=arrival.output_tokens if answered else None,
            tokens_from="ids",
            status=None if ended is None else 200 if failure is None else failure.status,
            finish="length" if answered else None,
            error=None if failure is None else failure.message,
        )

    def _chunks(self, number: int, last: int | None) -> list[Chunk]:
        """Each token where all are kept; else the first, and the others at the time of the last."""
        if self._times is not None:
            return self._times.pop(number, [])
        first = self._first.pop(number, None)
        if first is None:
            return []
        chunks = [Chunk(first / 1e9, 1)]
        more = self._arrivals[number].output_tokens - 1
        if last is not None and more > 0:
            chunks.append(Chunk(last / 1e9, more))
        return chunks
