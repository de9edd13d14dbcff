"""The C library: found, loaded for this CPU, its functions declared. The only place that loads it.

`STAFFEL_KERNELS` overrides the choice: `avx512`, `avx2` or `portable` takes that one, `off` none.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

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
    """A C function; `arguments` are ctypes, pointers are `ctypes.c_void_p` (see `pointer`)."""
    found = getattr(_library(), name)
    found.argtypes, found.restype = arguments, result
    return found


def pointer(tensor: Tensor | None) -> int | None:
    """The address of a tensor's first element, for a C function; None is NULL."""
    return None if tensor is None else tensor.data_ptr()


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
