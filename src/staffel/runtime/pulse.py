"""The pulse of an instance: a thread that tells how often its loop has gone round."""

from __future__ import annotations

import threading
from collections.abc import Callable

from staffel.control.messages import Beat
from staffel.runtime.links import BeatLink


class Pulse:
    """Beats until it is closed. The thread does nothing else, so no step can stop it."""

    def __init__(
        self,
        endpoint: str,
        instance: str,
        incarnation: int,
        seconds: float,
        turns: Callable[[], int],
    ) -> None:
        """`turns` counts the rounds of the instance's loop; `seconds` are between two beats."""
        self._endpoint = endpoint
        self._name = instance, incarnation
        self._seconds = seconds
        self._turns = turns
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        link = BeatLink(self._endpoint)
        while not self._closed.wait(self._seconds):
            link.send(Beat(*self._name, self._turns()))
        link.close()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
