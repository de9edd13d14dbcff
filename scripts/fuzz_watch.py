"""Who looks on while fuzz_http.py sends: at /health, somebody else's stream, and the processes."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import httpx
import psutil
from fuzz_answers import Fault

_TOKENS = 200
_HEALTH_S = 0.1
_PROCESSES_S = 0.2

Report = Callable[[Fault], None]


class Health:
    """Asks for /health all the time, each time on a new connection."""

    def __init__(self, url: str, bound: float, report: Report) -> None:
        self.slowest = 0.0
        self._place = urlsplit(url).netloc
        self._bound = bound
        self._report = report

    def watch(self, stop: threading.Event) -> None:
        while not stop.wait(_HEALTH_S):
            began = time.monotonic()
            try:
                status = self._ask()
                if status != 200:
                    self._report(Fault("malformed", f"/health says {status}"))
            except TimeoutError:
                self._report(Fault("hang", f"/health says nothing for {self._bound:g} s"))
            except (OSError, http.client.HTTPException) as error:
                self._report(Fault("malformed", f"/health: {error!r}"))
            self.slowest = max(self.slowest, time.monotonic() - began)

    def _ask(self) -> int:
        # httpx would spend more time on a new connection than the server does.
        connection = http.client.HTTPConnection(self._place, timeout=self._bound)
        with contextlib.closing(connection):
            connection.request("GET", "/health", headers={"Connection": "close"})
            answer = connection.getresponse()
            answer.read()
            return answer.status


class Stranger:
    """Streams the likeliest text of a prompt again and again; it must always be the first one's."""

    def __init__(self, url: str, bound: float, report: Report) -> None:
        self.longest_gap = 0.0
        """Seconds between two chunks of a stream."""
        self.slowest_first = 0.0
        """Seconds before the first."""
        self.streams = 0
        """Those that came to their end."""
        self._report = report
        self._client = httpx.Client(base_url=url, timeout=bound, trust_env=False)
        self._expected = ""

    def begin(self) -> None:
        """Take the text that all others must have. Raises as httpx does, or ValueError."""
        self._expected = "".join(self._pieces())

    def watch(self, stop: threading.Event) -> None:
        with contextlib.closing(self._client):
            while not stop.is_set():
                self._check(stop)
                stop.wait(0.01)

    def _check(self, stop: threading.Event) -> None:
        text = ""
        first = True
        last = time.monotonic()
        try:
            with contextlib.closing(self._pieces()) as pieces:
                for piece in pieces:
                    now = time.monotonic()
                    self._keep(now - last, first)
                    first, last = False, now
                    text += piece
                    if stop.is_set():
                        return
        except (httpx.HTTPError, ValueError, KeyError) as error:
            self._keep(time.monotonic() - last, first)
            what = f"after {len(text)} characters: {error!r}"
            self._report(Fault("crash", f"somebody else's stream broke off {what}"))
            stop.wait(0.5)
            return
        self.streams += 1
        if text != self._expected:
            pairs = enumerate(zip(text, self._expected, strict=False))
            shorter = min(len(text), len(self._expected))
            place = next((i for i, (a, b) in pairs if a != b), shorter)
            what = f"from character {place} on: {text[place : place + 100]!r}"
            self._report(Fault("crash", f"somebody else's stream has another text {what}"))

    def _keep(self, gap: float, first: bool) -> None:
        if first:
            self.slowest_first = max(self.slowest_first, gap)
        else:
            self.longest_gap = max(self.longest_gap, gap)

    def _pieces(self) -> Iterator[str]:
        """The text as it comes. Raises httpx.HTTPError, or ValueError for what is no whole text."""
        body = {
            "prompt": "Once upon a time",
            "max_tokens": _TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        with self._client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                raise ValueError(f"{answer.status_code}: {answer.read()[:300]!r}")
            for line in answer.iter_lines():
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    return
                if data:
                    chunk = json.loads(data)
                    if "error" in chunk:
                        raise ValueError(str(chunk["error"]))
                    yield chunk["choices"][0]["text"]
        raise ValueError("no [DONE]")


class Processes:
    """The server's process and its instances: all must live as long as the run."""

    def __init__(self, pid: int, report: Report, ended: Callable[[], None]) -> None:
        """`ended` is called when one of them has ended."""
        self._server = psutil.Process(pid)
        self._living = {self._server: "the server"} | {
            child: f"instance {child.pid}"
            for child in self._server.children(recursive=True)
            if "staffel.runtime.instance" in child.cmdline()
        }
        self._report = report
        self._ended = ended

    @property
    def memory(self) -> int:
        """Bytes of the server's own process; 0: it has ended."""
        try:
            return self._server.memory_info().rss
        except psutil.Error:
            return 0

    def watch(self, stop: threading.Event) -> None:
        while not stop.wait(_PROCESSES_S):
            self.look()

    def look(self) -> None:
        for process, name in list(self._living.items()):
            if not _lives(process):
                del self._living[process]
                self._report(Fault("crash", f"{name} has ended"))
                self._ended()


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def pid_of(url: str) -> int | None:
    """The process that listens at a URL of this machine; None: it can't be told."""
    port = urlsplit(url).port
    with contextlib.suppress(psutil.AccessDenied):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                return connection.pid
    return None
