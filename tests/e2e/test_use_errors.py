"""Wrong use: exit code 2, and one line that names the option and the way out."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from staffel import cli
from tests.e2e.server import free_port, run_cli

pytestmark = pytest.mark.e2e


def check_error(code: int, stderr: str, expected: tuple[str, ...]) -> None:
    assert code == 2, stderr
    assert "Traceback" not in stderr
    error = " ".join(stderr.split())
    for text in expected:
        assert text in error


def check_refused(args: list[str], *expected: str) -> None:
    """`staffel serve ARGS` ends with 2; the error holds each of `expected`."""
    ended = run_cli("serve", "--port", str(free_port()), *args)
    assert ended.stdout == ""
    check_error(ended.returncode, ended.stderr, expected)


@pytest.fixture
def check_parsing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Like `check_refused`, without a process of its own: for what is refused at once."""

    def check(args: list[str], *expected: str) -> None:
        ended = CliRunner().invoke(cli.app, ["serve", *args])
        check_error(ended.exit_code, ended.stderr, expected)

    def accepted(*_: object) -> None:
        pytest.fail("this was accepted")

    monkeypatch.setattr("staffel.api.server.serve", accepted)
    monkeypatch.setattr("staffel.runtime.logs.set_up_logging", lambda level: None)
    return check


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--prefill", "2", "--decode", "0"], ["--decode", "--colocated"]),
        (["--colocated", "1", "--prefill", "1"], ["no decode instance", "--decode N"]),
        (["--decode", "1", "--prefill", "0"], ["no prefill instance", "--prefill N"]),
        (["--policy", "prefill-first"], ["--policy", "--colocated N"]),
        (["--policy", "chunked", "--prefill", "1"], ["--policy", "--colocated N"]),
        (["--colocated", "1", "--policy", "fair"], ["--policy", "prefill-first"]),
        (["--prefill", "-1"], ["--prefill"]),
        (["--kv-memory", "lots"], ["--kv-memory", "1GiB"]),
        (["--kv-memory", "0"], ["--kv-memory"]),
        (["--block-size", "0"], ["--block-size"]),
        (["--chunk-tokens", "0"], ["--chunk-tokens"]),
        (["--max-sequences", "0"], ["--max-sequences"]),
        (["--threads", "0"], ["--threads"]),
        (["--max-model-len", "9000"], ["--max-model-len", "8192"]),
        (["--max-model-len", "1"], ["--max-model-len", "at least 2"]),
        (["--device", "tpu"], ["--device", "cpu"]),
        (["--port", "0"], ["--port"]),
        (["--request-timeout", "-1"], ["--request-timeout"]),
        (["--request-timeout", "nan"], ["--request-timeout"]),
        (["--drain-timeout", "inf"], ["--drain-timeout"]),
        (["--api-key", "schlüssel"], ["--api-key", "ASCII"]),
        (["--colocated", "1", "--local-prefill-below", "5"], ["--local-prefill-below"]),
        (["--placement", "/no/such/file"], ["--placement", "/no/such/file"]),
        (["--placement", "/"], ["--placement"]),
        (["no such model"], ["MODEL", "hub id"]),
        (["--no-such-option"], ["--no-such-option"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_options(check_parsing: Any, args: list[str], expected: list[str]) -> None:
    check_parsing(args, *expected)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--host", "no.such.host.invalid"], "--host"),
        (["--record", "/no/such/folder/journal"], "--record"),
        (["--request-timeout", "inf"], "--request-timeout"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_options_that_are_tried(args: list[str], expected: str) -> None:
    check_refused(args, expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "--placement"),
        ("instances: []", "--prefill"),
        ("instances: [{role: prefill}]", "no decode instance"),
        ("instances: [{role: chef}]", "$.instances[0].role"),
        ("instances: [{role: colocated, count: many}]", "$.instances[0].count"),
        ("instances: [{role: colocated, count: 0}]", "count"),
        ("instances: [{role: colocated, kv_memory: much}]", "kv_memory"),
        ("instances: [{role: colocated, colour: red}]", "colour"),
        ("instances: [{role: prefill, block_size: 8}, {role: decode}]", "block_size"),
        ("instances: [", "--placement"),
        ("\x00", "--placement"),
    ],
)
def test_placement_files(check_parsing: Any, tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "placement.yaml"
    file.write_text(text)
    check_parsing(["--placement", str(file)], expected)


def test_placement_file_and_options(check_parsing: Any, tmp_path: Path) -> None:
    file = tmp_path / "placement.yaml"
    file.write_text("instances: [{role: colocated}]")
    check_parsing(["--placement", str(file), "--prefill", "1"], "--placement", "--prefill")


def test_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        check_refused(["--port", port], "--port", port, "another")


def test_too_little_memory_for_one_sequence() -> None:
    args = ["--colocated", "1", "--threads", "1", "--kv-memory", "8MiB"]
    check_refused(args, "--kv-memory", "--max-model-len 8192")


@pytest.fixture
def folder(tmp_path: Path, real_model: Path) -> Path:
    """The default model's folder without its weights, to be spoilt."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(real_model / name, tmp_path)
    return tmp_path


def change_config(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_folder_without_config(check_parsing: Any, tmp_path: Path) -> None:
    check_parsing([str(tmp_path)], "MODEL", "config.json")


def test_unknown_architecture(folder: Path) -> None:
    change_config(folder, model_type="foo", architectures=["FooForCausalLM"])
    check_refused([str(folder), "--colocated", "1"], "MODEL", "foo")


def test_folder_without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    check_refused([str(folder), "--colocated", "1"], "MODEL", "tokenizer.json")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.json", "{"),
        ("config.json", "[]"),
        ("config.json", '{"architectures": 1, "vocab_size": 9, "n_ctx": 64}'),
        ("config.json", '{"architectures": ["LlamaForCausalLM"], "n_ctx": 64}'),
        ("generation_config.json", "{"),
    ],
)
def test_spoilt_config(check_parsing: Any, folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    check_parsing([str(folder)], "MODEL", name)


def test_spoilt_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    check_refused([str(folder)], "MODEL", "tokenizer.json")


@pytest.mark.parametrize("text", ["", "{", "[]", "no journal\n", '{"core": "x", "call": "tick"}\n'])
def test_replay_of_no_journal(tmp_path: Path, text: str) -> None:
    file = tmp_path / "journal"
    file.write_text(text)
    ended = CliRunner().invoke(cli.app, ["replay", str(file)])
    check_error(ended.exit_code, ended.stderr + ended.stdout, ("JOURNAL",))


def test_replay_of_no_file(tmp_path: Path) -> None:
    ended = CliRunner().invoke(cli.app, ["replay", str(tmp_path / "none")])
    check_error(ended.exit_code, ended.stderr, ("JOURNAL",))


def test_a_plan_that_cannot_be_served_is_refused_before_its_model_is_fetched(
    check_parsing: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("staffel.model.hub.resolve", lambda *_: pytest.fail("fetched"))
    file = tmp_path / "placement.yaml"
    file.write_text("{model: a/b, instances: [{role: colocated, parallel: {tp: 4}}]}")
    check_parsing(["--placement", str(file)], "colocated: parallel: tp: 4", "--executable")
