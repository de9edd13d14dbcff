"""Writing down what a core was told, and finding out whether another core would do the same.

A journal is JSON lines. The first line of a core makes it, and names the version of the journal;
each other one is a call: its arguments, with the time that was passed, and what it returned.
Several cores may share a file. A server that is killed leaves a last line that is cut off.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from types import GenericAlias
from typing import Any, NamedTuple, get_type_hints

import msgspec
from msgspec import Raw, Struct

from staffel.control.engine import EngineCore
from staffel.control.fleet import FleetConfig, FleetCore
from staffel.control.messages import EngineConfig, RouterConfig
from staffel.control.router import RouterCore

Core = EngineCore | RouterCore | FleetCore

_CALLS = {
    "engine": (EngineCore, EngineConfig, ("receive", "prepared", "schedule", "commit", "report")),
    "fleet": (
        FleetCore,
        FleetConfig,
        ("start", "hello", "unable", "ended", "beat", "tick", "drain"),
    ),
    "router": (RouterCore, RouterConfig, ("submit", "cancel", "join", "lost", "receive", "tick")),
}


_VERSION = 2
"""Raised when a journal of before can't be replayed any more, whatever changed."""

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
    """For the making line the journal's version."""


class Mismatch(NamedTuple):
    """A call that returned something else than when it was recorded."""

    line: int
    core: str
    call: str
    recorded: bytes
    replayed: bytes


class Replay(NamedTuple):
    """How a replay went. It stops at the first line that isn't as it should be."""

    cores: int
    calls: int
    mismatch: Mismatch | None = None
    """A call that returned something else."""
    fault: str | None = None
    """What is wrong with a line, and which; all before it was the same."""
    cut_off: bool = False
    """The last line isn't whole, as a killed server leaves it; all before it was the same."""


class _Fault(Exception):
    """A line is none of a journal, or of another version's."""


def record(core: Core, kind: str, name: str, write: Callable[[bytes], None]) -> None:
    """From now on, write every call of the core as one line.

    `write` gets a whole line at a time, and must append it in one piece.
    """
    write(_line(name, kind, msgspec.json.encode(core.config), b"%d" % _VERSION))
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

    It goes as far as it can: up to a call that returns something else, a line that is none of a
    journal's, or the end.
    """
    cores: dict[str, tuple[Core, dict[str, Any]]] = {}
    calls = 0
    for number, line in enumerate(lines, 1):
        if not line.endswith(b"\n"):
            return Replay(len(cores), calls, cut_off=True)
        try:
            entry = _entry(line, cores)
            if entry.call in _CALLS:
                cores[entry.core] = _make(entry)
                continue
            core, types = cores[entry.core]
            arguments = _arguments(entry, types)
        except _Fault as fault:
            return Replay(len(cores), calls, fault=f"line {number}: {fault}")
        calls += 1
        returned = _call(getattr(core, entry.call), arguments)
        if returned != bytes(entry.returned):
            mismatch = Mismatch(number, entry.core, entry.call, bytes(entry.returned), returned)
            return Replay(len(cores), calls, mismatch)
    return Replay(len(cores), calls)


def _entry(line: bytes, cores: Collection[str]) -> Entry:
    try:
        entry = msgspec.json.decode(line, type=Entry)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _Fault(f"is no line of a journal: {error}") from None
    if entry.call not in _CALLS and entry.core not in cores:
        raise _Fault(f"is a call of {entry.core!r}, of which no line before says how it was made")
    return entry


def _arguments(entry: Entry, types: dict[str, Any]) -> Any:
    if entry.call not in types:
        raise _Fault(f"is a call of {entry.call!r}, which {entry.core!r} doesn't know")
    try:
        return msgspec.json.decode(entry.arguments, type=types[entry.call])
    except msgspec.MsgspecError as error:
        raise _Fault(f"has arguments that aren't those of {entry.call!r}: {error}") from None


def _call(method: Callable[..., Any], arguments: Any) -> bytes:
    try:
        return msgspec.json.encode(method(*arguments))
    except Exception:
        return _RAISED


def _make(entry: Entry) -> tuple[Core, dict[str, Any]]:
    core_type, config_type, calls = _CALLS[entry.call]
    if bytes(entry.returned) != b"%d" % _VERSION:
        raise _Fault(
            f"is of version {bytes(entry.returned).decode()} of the journal, and this Staffel "
            f"replays version {_VERSION}: take the one that recorded it"
        )
    try:
        config: Any = msgspec.json.decode(entry.arguments, type=config_type)
    except msgspec.MsgspecError as error:
        raise _Fault(f"has a config that isn't one: {error}") from None
    return core_type(config), {call: _arguments_type(getattr(core_type, call)) for call in calls}


def _arguments_type(method: Callable[..., Any]) -> Any:
    hints = get_type_hints(method)
    hints.pop("return", None)
    return GenericAlias(tuple, tuple(hints.values()))
