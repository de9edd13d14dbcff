"""What the API needs of the serving runtime."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Literal, Protocol

from staffel.control.messages import Delta, Failure, Load
from staffel.control.request import Request

State = Literal["starting", "ready", "draining", "degraded"]
Stream = AsyncIterator[Delta | Failure]
"""Deltas up to one with `finish` set; or, at any point, a Failure as the last item."""


class InstanceStatus(Protocol):
    """An instance as the router sees it now."""

    @property
    def instance(self) -> str: ...
    @property
    def role(self) -> str: ...
    @property
    def ready(self) -> bool: ...
    @property
    def state(self) -> str:
        """ "ready", or what it is up to instead."""

    @property
    def restarts(self) -> int: ...
    @property
    def reason(self) -> str:
        """Why it isn't ready, where that is known."""

    @property
    def load(self) -> Load | None:
        """None before the first report."""


class Engine(Protocol):
    """Token ids in, token ids out; every method returns at once."""

    def submit(self, request: Request) -> Stream:
        """Take a request. What goes wrong comes as the stream's Failure."""

    def cancel(self, request_id: str) -> None:
        """Forget a request; does nothing for one that is over or unknown."""

    def state(self) -> State:
        """ "ready" is the only state that takes requests; "degraded": a phase has no instance."""

    @property
    def queued(self) -> int:
        """Requests that wait in the router for an instance to take them."""

    def status(self) -> Sequence[InstanceStatus]: ...
