"""Writing down what a core was told, and finding out whether another core would do the same.

A journal is JSON lines. The first line of a core makes it; each other one is a call: its
arguments, with the time that was passed, and what it returned. Several cores may share a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import GenericAlias
from typing import Any, NamedTuple, get_type_hints

import msgspec
from msgspec import Raw, Struct

from staffel.control.engine import EngineCore
from staffel.control.messages import EngineConfig, RouterConfig
from staffel.control.router import RouterCore

Core = EngineCore | RouterCore

_CALLS = {
    "engine": (EngineCore, EngineConfig, ("receive", "prepared", "schedule", "commit", "report")),
    "router": (RouterCore, RouterConfig, ("submit", "cancel", "join", "lost", "receive", "tick")),
}


_RAISED = b'"raised"'
"""Stands for what a call returned that failed."""


class Entry(Struct, frozen=True):
    """A line of the journal."""

    core: str
    """Which core: unique in the file."""
    call: str
    """A method's name, or the core's kind for the line that makes it."""
    arguments: Raw
    """A list; for the making line the config."""
    returned: Raw = Raw(b"null")


class Mismatch(NamedTuple):
    """A call that returned something else than when it was recorded."""

    line: int
    core: str
    call: str
    recorded: bytes
    replayed: bytes


class Replay(NamedTuple):
    """How a replay went."""

    cores: int
    calls: int
    mismatch: Mismatch | None
    """The first one; the replay stops there."""


def record(core: Core, kind: str, name: str, write: Callable[[bytes], None]) -> None:
    """From now on, write every call of the core as one line.

    `write` gets a whole line at a time, and must append it in one piece.
    """
    write(_line(name, kind, msgspec.json.encode(core.config), b"null"))
    for call in _CALLS[kind][2]:
        setattr(core, call, _recorded(getattr(core, call), name, call, write))


def _recorded(
    method: Callable[..., Any], name: str, call: str, write: Callable[[bytes], None]
) -> Callable[..., Any]:
    def recorded(*arguments: Any) -> Any:
        # Encoded first: a core may take over what it is given.
        encoded = msgspec.json.encode(arguments)
        try:
            returned = method(*arguments)
        except Exception:
            write(_line(name, call, encoded, _RAISED))  # the very call that one looks for
            raise
        write(_line(name, call, encoded, msgspec.json.encode(returned)))
        return returned

    return recorded


def _line(name: str, call: str, arguments: bytes, returned: bytes) -> bytes:
    return msgspec.json.encode(Entry(name, call, Raw(arguments), Raw(returned))) + b"\n"


def replay(lines: Iterable[bytes]) -> Replay:
    """Run a journal through fresh cores and compare every returned value, byte for byte.

    Raises msgspec.DecodeError where a line is not a journal's.
    """
    cores: dict[str, tuple[Core, dict[str, Any]]] = {}
    calls = 0
    for number, line in enumerate(lines, 1):
        entry = msgspec.json.decode(line, type=Entry)
        if entry.call in _CALLS:
            cores[entry.core] = _make(entry)
            continue
        calls += 1
        core, types = cores[entry.core]
        arguments = msgspec.json.decode(entry.arguments, type=types[entry.call])
        returned = _call(getattr(core, entry.call), arguments)
        if returned != bytes(entry.returned):
            mismatch = Mismatch(number, entry.core, entry.call, bytes(entry.returned), returned)
            return Replay(len(cores), calls, mismatch)
    return Replay(len(cores), calls, None)


def _call(method: Callable[..., Any], arguments: Any) -> bytes:
    try:
        return msgspec.json.encode(method(*arguments))
    except Exception:
        return _RAISED


def _make(entry: Entry) -> tuple[Core, dict[str, Any]]:
    core_type, config_type, calls = _CALLS[entry.call]
    config: Any = msgspec.json.decode(entry.arguments, type=config_type)
    return core_type(config), {call: _arguments_type(getattr(core_type, call)) for call in calls}


def _arguments_type(method: Callable[..., Any]) -> Any:
    hints = get_type_hints(method)
    hints.pop("return", None)
    return GenericAlias(tuple, tuple(hints.values()))
