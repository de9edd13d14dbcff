"""A journal that can't be written any more ends, and nothing else does."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from staffel.config import ConfigError
from staffel.runtime.journal_file import JournalFile, check_writable
from tests.model.families import make_model
from tests.runtime.system import generate_all, greedy, model_spec, running


def test_lines_of_several_writers(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    one, other = JournalFile(path), JournalFile(path)
    one.append(b"a\n")
    other.append(b"b\n")
    assert path.read_bytes() == b"a\nb\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_full_disk_ends_it_loudly(caplog: pytest.LogCaptureFixture) -> None:
    journal = JournalFile(Path("/dev/full"))
    for _ in range(3):
        journal.append(b"a line\n")
    assert journal.ended
    assert len(caplog.records) == 1
    assert "ends here" in caplog.text
    assert "No space left" in caplog.text


@pytest.mark.parametrize("path", ["/dev/full", "/no/such/folder/journal", "/tmp"])
def test_what_can_be_no_journal_is_refused_at_the_start(path: str) -> None:
    with pytest.raises(ConfigError, match="--record"):
        check_writable(Path(path))


def test_checking_empties_the_file(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_text("an old one\n")
    check_writable(path)
    assert path.read_bytes() == b""


async def test_requests_go_on_when_the_disk_is_full(tmp_path: Path) -> None:
    path, model = tmp_path / "journal", model_spec(make_model("llama", tmp_path))
    roles, options = ["prefill", "decode"], {"record": path}
    async with running(model, roles, options=options) as service:
        before = await generate_all(service, [greedy("before", [1, 2, 3], 5)])
        fill_disk_under(path)
        after = await generate_all(service, [greedy(f"after{n}", [1, 2, 3], 5) for n in range(5)])
        assert not service.recording
    assert all(output.ids == before[0].ids for output in after)
    assert b"after4" not in path.read_bytes()


def fill_disk_under(path: Path) -> None:
    """Whatever this process has open there takes nothing more."""
    full = os.open("/dev/full", os.O_WRONLY)
    for name in os.listdir("/proc/self/fd"):
        if os.path.realpath(f"/proc/self/fd/{name}") == str(path):
            os.dup2(full, int(name))
    os.close(full)
