"""Somebody else on the same server: what a request does to those who have nothing to do with it."""

from __future__ import annotations

import threading
import time
from types import TracebackType

import httpx

from tests.e2e.server import MODEL, Server

_PROMPT = "Once upon a time"
_TOKENS = 100

_texts: dict[str, str] = {}
"""By server: what it streams when nobody else is there."""


class Bystander:
    """Streams the likeliest text of a prompt again and again, and asks for /health all the time."""

    def __init__(self, server: Server) -> None:
        self.longest_gap = 0.0
        """Seconds between two chunks of a stream, or before its first."""
        self.slowest_health = 0.0
        self.streams = 0
        """Those that came to their end."""
        self._server = server
        self._stop = threading.Event()
        self._troubles: list[str] = []
        self._expected = _texts.get(server.url) or self._stream()
        _texts[server.url] = self._expected
        self.longest_gap = 0.0
        self._threads = [
            threading.Thread(target=self._watch, args=(work,), daemon=True)
            for work in (self._check_stream, self._check_health)
        ]

    def __enter__(self) -> Bystander:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType
    ) -> None:
        if error is None:
            time.sleep(0.2)  # for what comes late
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def check(self, longest_s: float = 2.0) -> None:
        """Nothing was lost or different, and nothing took longer than that."""
        assert not self._troubles, self._troubles[:3]
        assert self.longest_gap < longest_s, f"a stream stood still for {self.longest_gap:.2f} s"
        assert self.slowest_health < longest_s, f"/health took {self.slowest_health:.2f} s"

    def _watch(self, work: object) -> None:
        while not self._stop.is_set():
            try:
                work()  # type: ignore[operator]
            except Exception as error:
                self._troubles.append(repr(error))

    def _check_stream(self) -> None:
        text = self._stream()
        self.streams += 1
        if not self._expected.startswith(text):
            self._troubles.append(f"another text: {text!r}")
        elif text != self._expected and not self._stop.is_set():
            self._troubles.append(f"a text that breaks off: {text!r}")

    def _stream(self) -> str:
        """The text, as far as it came before the end of the test."""
        chunks = self._server.client.completions.create(
            model=MODEL,
            prompt=_PROMPT,
            max_tokens=_TOKENS,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        text, last = "", time.monotonic()
        for chunk in chunks:
            now = time.monotonic()
            self.longest_gap, last = max(self.longest_gap, now - last), now
            text += chunk.choices[0].text
            if self._stop.is_set():
                chunks.close()
                break
        return text

    def _check_health(self) -> None:
        began = time.monotonic()
        status = httpx.get(f"{self._server.url}/health", timeout=30).status_code
        self.slowest_health = max(self.slowest_health, time.monotonic() - began)
        if status != 200:
            self._troubles.append(f"/health says {status}")
        time.sleep(0.05)
