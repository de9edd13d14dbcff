"""What is told of a client request at its end: one log line, and the metrics."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from staffel.api.metrics import Metrics
from staffel.control.request import FinishReason

_log = logging.getLogger("staffel.request")

CLIENT_LEFT = 499
"""nginx's status for a client that closed the connection; nobody ever receives it."""


@dataclass(slots=True)
class _Times:
    first: int
    last: int
    count: int


@dataclass(slots=True)
class Record:
    """Collects while a request runs. Times are in nanoseconds of `clock`."""

    metrics: Metrics
    clock: Callable[[], int]
    arrival: int
    request_id: str = ""
    endpoint: str = ""
    """Stays empty for requests that aren't work (health, metrics): those aren't told."""
    id: str = ""
    model: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    status: int = 500
    finishes: list[FinishReason] = field(default_factory=list)
    _choices: dict[int, _Times] = field(default_factory=dict)

    def tokens(self, choice: int, count: int) -> None:
        """`count` tokens of a choice came just now, in one go."""
        if count == 0:
            return
        now = self.clock()
        self.output_tokens += count
        times = self._choices.get(choice)
        gaps = count - 1
        if times is None:
            if not self._choices:
                self.metrics.ttft.observe((now - self.arrival) / 1e9)
            self._choices[choice] = _Times(now, now, count)
        else:
            self.metrics.itl.observe((now - times.last) / 1e9)
            times.last = now
            times.count += count
        for _ in range(gaps):
            self.metrics.itl.observe(0.0)

    @property
    def finish(self) -> str:
        """Of all choices: "length" if any was cut short; else how it ended."""
        if self.status == CLIENT_LEFT:
            return "cancelled"
        if self.status != 200:
            return "error"
        return "length" if "length" in self.finishes else "stop"

    def close(self) -> None:
        if not self.endpoint:
            return
        self.metrics.requests.labels(self.endpoint, str(self.status), self.finish).inc()
        self.metrics.prompt_tokens.inc(self.prompt_tokens)
        self.metrics.cached_tokens.inc(self.cached_tokens)
        self.metrics.output_tokens.inc(self.output_tokens)
        if self.finish in ("stop", "length") and self._choices:
            self._observe_latencies()
        # What reached the router has a line of its own there, with the times of each phase.
        level = logging.DEBUG if self.prompt_tokens else logging.INFO
        _log.log(level, "client request ended", extra={"fields": self._line()})

    def _observe_latencies(self) -> None:
        last = max(times.last for times in self._choices.values())
        self.metrics.e2e.observe((last - self.arrival) / 1e9)
        for times in self._choices.values():
            if times.count > 1:
                span = (times.last - times.first) / 1e9
                self.metrics.tpot.observe(span / (times.count - 1))

    def _line(self) -> dict[str, str | int | float | None]:
        first = min((times.first for times in self._choices.values()), default=None)
        return {
            "request_id": self.request_id,
            "id": self.id,
            "endpoint": self.endpoint,
            "model": self.model,
            "status": self.status,
            "finish": self.finish,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "ttft_ms": None if first is None else _ms(first - self.arrival),
            "e2e_ms": _ms(self.clock() - self.arrival),
        }


def _ms(ns: int) -> float:
    return round(ns / 1e6, 3)
