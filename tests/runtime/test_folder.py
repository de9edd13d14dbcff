"""The folder of a server: its own while it lives, cleared away once it was killed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from staffel.config import ConfigError
from staffel.runtime.folder import ServerFolder

_CHILD = """
import sys, time
from staffel.runtime.folder import ServerFolder
folder = ServerFolder()
(folder.path / "router").touch()
print(folder.path, flush=True)
time.sleep(60)
"""


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    short = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(short))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return short


def start_child() -> tuple[subprocess.Popen[str], Path]:
    child = subprocess.Popen([sys.executable, "-c", _CHILD], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    return child, Path(child.stdout.readline().strip())


def test_a_killed_servers_folder_is_cleared_at_the_next_start(base: Path) -> None:
    (killed, left), (running, used) = start_child(), start_child()
    try:
        killed.kill()
        killed.wait()
        assert left.exists()
        folder = ServerFolder()
        assert not left.exists()
        assert used.exists()
        folder.close()
        assert [*base.iterdir()] == [used]
    finally:
        running.kill()
        running.wait()


def test_what_is_no_servers_stays(base: Path) -> None:
    (base / "staffel-notes").mkdir()
    (base / "staffel-notes" / "important").touch()
    (base / "staffel-new").mkdir()  # perhaps one that another server makes just now
    (base / "staffel-file").touch()
    ServerFolder().close()
    assert {path.name for path in base.iterdir()} == {
        "staffel-notes",
        "staffel-new",
        "staffel-file",
    }


def test_a_path_that_is_too_long_for_a_socket(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(base / ("x" * 90)))
    with pytest.raises(ConfigError, match="TMPDIR"):
        ServerFolder()
