"""The folder of a running server, for the socket of its instances.

A lock on it lives as long as the server's process, whatever way that ends: a folder whose lock can
be taken is what a killed server left behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from staffel.config import ConfigError

_PREFIX = "staffel-"
_LOCK = "lock"
_LONGEST_TMPDIR = 80
"""Linux allows 107 bytes for a socket's path."""
_BEING_MADE_S = 60
"""A younger folder without a lock may be one that another server is just making."""


class ServerFolder:
    """A new folder that only this user can open."""

    def __init__(self) -> None:
        """Raises ConfigError where the temporary folder's path is longer than a socket's may be."""
        base = Path(tempfile.gettempdir())
        if len(str(base)) > _LONGEST_TMPDIR:
            raise ConfigError(f"TMPDIR: {base} is too long for a socket's path")
        clear_left_behind(base)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self) -> None:
        """Remove it, with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def clear_left_behind(base: Path) -> None:
    """Remove the folders of this user's servers that were killed."""
    for folder in base.glob(f"{_PREFIX}*"):
        if _left_behind(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _left_behind(folder: Path) -> bool:
    try:
        status = folder.lstat()
        ours = folder.is_dir() and not folder.is_symlink() and status.st_uid == os.getuid()
        if not ours or not all(name in (_LOCK, "router") for name in os.listdir(folder)):
            return False
        if not (folder / _LOCK).exists():
            return time.time() - status.st_mtime > _BEING_MADE_S
        with _opened(folder / _LOCK) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # in use, or gone by now
        return False
    return True


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
