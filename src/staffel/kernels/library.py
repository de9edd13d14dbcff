"""The C library: found, loaded for this CPU, its functions declared. The only place that loads it.

`STAFFEL_KERNELS` overrides the choice: `avx512`, `avx2` or `portable` takes that one, `off` none.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any, Protocol

from torch import Tensor

from staffel.config import ConfigError

log = logging.getLogger(__name__)

LEVELS = ("portable", "avx2", "avx512")
_VARIABLE = "STAFFEL_KERNELS"


@cache
def level() -> str | None:
    """The instruction set of the library in use; None: there is none, and torch does the work.

    Raises:
        ConfigError: STAFFEL_KERNELS names none, or one that this CPU or package lacks.
    """
    asked = os.environ.get(_VARIABLE, "")
    if asked == "off":
        return None
    best = _best()
    if not asked:
        if best is None:
            log.warning("the CPU kernels are not built (no C compiler?); torch does the work")
        return best
    if asked not in LEVELS:
        raise ConfigError(f"{_VARIABLE}: {asked!r} is none of {', '.join(LEVELS)}, off")
    if best is None or LEVELS.index(asked) > LEVELS.index(best) or _file(asked) is None:
        raise ConfigError(f"{_VARIABLE}: {asked} can't run here; leave it out to take the best")
    return asked


def function(name: str, *arguments: Any, result: Any = None) -> Callable[..., Any]:
    """A C function; `arguments` are ctypes, pointers are `ctypes.c_void_p` (see `pointer`).

    Those that compute give nothing, or a number that is not 0 where something is wrong.
    """
    found = getattr(_library(), name)
    found.argtypes, found.restype = arguments, result

    def call(*given: Any) -> Any:
        recorder = _recorder()
        if recorder is not None:
            recorder.note(found, given)
        return found(*given)

    return call


def pointer(tensor: Tensor | None) -> int | None:
    """The address of a tensor's first element, for a C function; None is NULL."""
    return None if tensor is None else tensor.data_ptr()


# ---- recording calls


class Recorder(Protocol):
    """Hears of a thread's C calls, to make them again later."""

    def note(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """A call that is about to be made."""

    def spoil(self, reason: str) -> None:
        """Making the same calls again won't do the same."""


_local = threading.local()


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Let it hear of all calls of this thread meanwhile."""
    _local.recorder = recorder
    try:
        yield
    finally:
        del _local.recorder


def unrecordable(reason: str) -> None:
    """Said by who does something between the calls that they depend on."""
    recorder = _recorder()
    if recorder is not None:
        recorder.spoil(reason)


def _recorder() -> Recorder | None:
    return getattr(_local, "recorder", None)


# ---- loading


def _best() -> str | None:
    portable = _file("portable")
    if portable is None:
        return None
    able = LEVELS[: ctypes.CDLL(portable).staffel_cpu_level() + 1]
    return next(name for name in reversed(able) if _file(name) is not None)


@cache
def _library() -> ctypes.CDLL:
    name = level()
    path = None if name is None else _file(name)
    if path is None:
        raise RuntimeError("a kernel was called, and there is no library")
    return ctypes.CDLL(path)


def _file(name: str) -> str | None:
    spec = find_spec(f"staffel.kernels._{name}")
    return None if spec is None else spec.origin
