"""Log lines as JSON objects on stderr, one a line, written by a thread: logging never waits."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
import time
import traceback
from datetime import UTC, datetime

import msgspec

_KEPT_LINES = 10_000
"""Most lines that wait for whoever reads stderr; what comes on top is dropped and counted."""

_LAST_WORDS_S = 1.0
"""How long the end of a process waits for its last lines to be read."""

_OFTEN = ("asyncio", "uvicorn.error", "staffel.links")
"""Loggers that anybody on the network can make talk; each message is let through once a second."""


class JsonFormatter(logging.Formatter):
    """A record as one JSON object; `extra={"fields": {...}}` adds to it."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["exception"] = "".join(traceback.format_exception(*record.exc_info))
        return msgspec.json.encode(entry).decode()


class OncePerSecond(logging.Filter):
    """Lets a message of `_OFTEN` through once a second; the next one says how many were left out.

    Messages are told apart by logger and first line, before its arguments are filled in.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[tuple[str, str], tuple[float, int]] = {}
        """When a message was last let through, and how often it came since."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name not in _OFTEN:
            return True
        key = (record.name, str(record.msg).partition("\n")[0])
        last, left_out = self._seen.get(key, (-1.0, 0))
        if record.created - last < 1:
            self._seen[key] = (last, left_out + 1)
            return False
        self._seen[key] = (record.created, 0)
        if left_out:
            record.fields = {**getattr(record, "fields", {}), "left_out": left_out}
        return True


class WaitlessHandler(logging.Handler):
    """Hands lines to a thread that writes them: whoever doesn't read costs lines, not time."""

    def __init__(self, descriptor: int, kept: int = _KEPT_LINES) -> None:
        super().__init__()
        self.dropped = 0
        """Lines that were never written."""
        self._descriptor = descriptor
        self._lines: queue.Queue[str | None] = queue.Queue(kept)
        self._writer = threading.Thread(target=self._write_forever, name="log", daemon=True)
        self._writer.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Let the last lines be written, for a while."""
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
            self._writer.join(_LAST_WORDS_S)
        super().close()

    def _write_forever(self) -> None:
        told = 0
        while (line := self._lines.get()) is not None:
            self._write(line)
            if self.dropped > told:
                self._write(self._drops(self.dropped - told))
                told = self.dropped

    def _drops(self, count: int) -> str:
        text = "log lines were dropped: stderr isn't read as fast as it is written"
        record = logging.LogRecord("staffel.logs", logging.WARNING, "", 0, text, None, None)
        record.fields = {"dropped": count}
        return self.format(record)

    def _write(self, line: str) -> None:
        data = line.encode() + b"\n"
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError:  # closed, or a full disk
            self.dropped += 1
            time.sleep(0.01)  # a file that refuses at once would be tried again all the time


_handler: WaitlessHandler | None = None


def set_up_logging(level: str) -> None:
    """JSON lines of this process on stderr, from `level` on."""
    global _handler
    _handler = WaitlessHandler(sys.stderr.fileno())
    _handler.setFormatter(JsonFormatter())
    _handler.addFilter(OncePerSecond())
    root = logging.getLogger()
    root.handlers = [_handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("staffel").setLevel(level.upper())
    logging.captureWarnings(True)


def dropped_lines() -> int:
    """Log lines of this process that nobody will ever read."""
    return 0 if _handler is None else _handler.dropped
