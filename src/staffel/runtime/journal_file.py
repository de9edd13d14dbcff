"""The file of a journal. When it can't be written the journal ends, and serving goes on."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from staffel.config import ConfigError

log = logging.getLogger("staffel.journal")


class JournalFile:
    """Appends whole lines to a file that several processes share; only its owner may read it."""

    def __init__(self, path: Path) -> None:
        """Raises OSError where the file can't be opened."""
        self._path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self.ended = False
        """Whether a line couldn't be written: none is from then on, as a journal has no holes."""

    def append(self, line: bytes) -> None:
        if self.ended:
            return
        try:
            # One write call: with O_APPEND the kernel keeps the lines of several writers whole.
            written = os.write(self._descriptor, line)
        except OSError as error:
            self._end(error.strerror or str(error))
        else:
            if written < len(line):
                self._end("the disk is full")

    def _end(self, reason: str) -> None:
        self.ended = True
        log.error("the journal %s ends here (%s); serving goes on without it", self._path, reason)

    def close(self) -> None:
        os.close(self._descriptor)


def check_writable(path: Path) -> None:
    """Empty the file, and see that a line can be written to it.

    Raises:
        ConfigError: --record names what can't be a journal.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.write(descriptor, b"\n")  # a full disk refuses it
            if os.path.isfile(path):
                os.ftruncate(descriptor, 0)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ConfigError(
            f"--record: {path} can't be written: {error.strerror}; give another file"
        ) from None
