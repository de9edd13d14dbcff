"""A journal replays to the same commands, and a changed one is found out."""

from __future__ import annotations

from contextlib import suppress

import pytest

from staffel.control.journal import Replay, record, replay
from staffel.control.messages import BatchResult
from tests.control.world import World, request


@pytest.fixture
def lines() -> list[bytes]:
    """The journal of a small world with a loss, a cancellation and a timeout check."""
    written: list[bytes] = []
    world = World(depth=2)
    record(world.router, "router", "router", written.append)
    for name, role in (("prefill-0", "prefill"), ("decode-0", "decode"), ("decode-1", "decode")):
        worker = world.add(name, role)
        record(worker.core, "engine", f"{name}/{worker.config.incarnation}", written.append)
    for number in range(12):
        world.submit(request(f"r{number}", [number + 1] * (3 * number + 1), 9))
        world.turn()
        if number == 5:
            world.kill("decode-1")
        if number == 7:
            world.cancel("r7")
        world.tick(1)
    world.run()
    world.assert_at_rest()
    return written


def test_replays_to_the_same_commands(lines: list[bytes]) -> None:
    result = replay(lines)
    assert result == Replay(4, len(lines) - 4)
    assert result.calls > 100


@pytest.mark.parametrize("call", ["submit", "schedule", "commit", "report", "receive"])
def test_a_missing_call_is_found_out(lines: list[bytes], call: str) -> None:
    at = next(i for i, line in enumerate(lines) if f'"call":"{call}"'.encode() in line)
    with suppress(KeyError):  # a commit of a batch that was never scheduled
        assert replay(lines[:at] + lines[at + 1 :]).mismatch is not None


def test_a_changed_command_is_shown(lines: list[bytes]) -> None:
    at = max(i for i, line in enumerate(lines) if b'"schedule"' in line and b'"returned":[' in line)
    changed = lines[at].replace(b'"returned":[', b'"returned":[1')
    mismatch = replay([*lines[:at], changed, *lines[at + 1 :]]).mismatch
    assert mismatch is not None
    assert mismatch.line == at + 1
    assert mismatch.call == "schedule"
    assert mismatch.recorded != mismatch.replayed


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b"hello\n", "no line of a journal"),
        (b'{"core":"x"}\n', "no line of a journal"),
        (b"\xff\xfe\n", "no line of a journal"),
        (b'{"core":"new","call":"tick","arguments":[1],"returned":null}\n', "how it was made"),
        (b'{"core":"router","call":"dance","arguments":[1],"returned":null}\n', "doesn't know"),
        (b'{"core":"router","call":"tick","arguments":["x"],"returned":null}\n', "'tick'"),
        (b'{"core":"n","call":"router","arguments":{},"returned":2}\n', "config"),
        (b'{"core":"n","call":"router","arguments":{},"returned":null}\n', "version null"),
        (b'{"core":"n","call":"router","arguments":{},"returned":99}\n', "version 99"),
    ],
)
def test_a_wrong_line_is_named_and_what_comes_before_it_counts(
    lines: list[bytes], line: bytes, what: str
) -> None:
    result = replay([*lines[:50], line, *lines[50:]])
    assert result.mismatch is None
    assert result.calls == 46
    assert result.fault.startswith("line 51: ")
    assert what in result.fault


def test_what_a_killed_server_leaves_is_replayed_up_to_its_end(lines: list[bytes]) -> None:
    result = replay([*lines[:50], lines[50][:40]])
    assert (result.calls, result.mismatch, result.fault) == (46, None, None)
    assert result.cut_off


def test_the_call_that_failed_is_in_the_journal() -> None:
    written: list[bytes] = []
    world = World()
    worker = world.add("colocated-0", "colocated")
    record(worker.core, "engine", "colocated-0", written.append)
    with pytest.raises(KeyError):
        worker.core.commit(77, BatchResult([], []), 0)
    assert replay(written) == Replay(1, 1)
    assert b'"commit"' in written[-1]
