"""`staffel bench` as it is typed, against a fake server in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from staffel.bench.commands import _numbers, app
from staffel.bench.results import Result
from staffel.config import SLO, ConfigError


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    command = [sys.executable, "-m", "tests.bench.fake_server", "--prefill", "0.01"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        process.stdin.close()


def bench(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "staffel", "bench", *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == code, ended.stderr
    assert "Traceback" not in ended.stderr
    return ended


LOAD = ["--workload", "fixed:10,3", "--slo", "ttft=0.25,tpot=0.1"]


def test_one_rate_quietly(url: str, tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    words = ["run", url, *LOAD, "--rate", "30", "--requests", "90", "--quiet", "-o", str(out)]
    ended = bench(*words, "--api-key", "secret")
    assert ended.stdout.startswith("rate=30 attainment=1.0000 ttft_p90=0.0")
    assert ended.stdout.count("\n") == 1
    assert ended.stderr == ""
    result = Result.load(out)
    assert result.command.endswith("--api-key '***'")
    assert len(result.probes[0].records) == 90
    assert result.model == "fake"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_was_measured_until_a_signal_is_kept(
    url: str, tmp_path: Path, number: signal.Signals
) -> None:
    """Ctrl-C, and the time limit of a CI."""
    file = tmp_path / "result.json"
    words = ["run", url, *LOAD, "--rate", "5", "--duration", "600", "-o", str(file)]
    command = [sys.executable, "-m", "staffel", "bench", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        time.sleep(8)
        running.send_signal(number)
        said = running.communicate(timeout=30)[0]
    assert running.returncode in (130, 2)  # 2: where the machine was too busy to send in time
    assert "interrupted" in said
    kept = Result.load(file)
    assert kept.interrupted
    assert kept.probes[0].records


def test_sweep_with_page(url: str, tmp_path: Path) -> None:
    ended = bench(
        "sweep", url, *LOAD, "--rates", "10:20:10", "--duration", "3", "--label", "fake",
        "--report", str(tmp_path / "page"),
    )  # fmt: skip
    assert "Attainment against rate" in ended.stdout
    assert (tmp_path / "page" / "index.html").stat().st_size > 50_000


def test_slo_of_an_unloaded_server_is_for_others_to_use(url: str, tmp_path: Path) -> None:
    file = tmp_path / "slo.json"
    bench("slo", url, "--workload", "fixed:10,5", "--slo", "auto:ttft=5x,tpot=3x", "-o", str(file))
    slo = SLO.load(file)
    assert 0.04 < slo.ttft < 0.3
    assert 0.012 < slo.tpot < 0.05
    words = ["run", url, "--workload", "fixed:10,3", "--slo", str(file)]
    bench(*words, "--rate", "20", "--requests", "30")


def test_scales_and_compare(url: str, tmp_path: Path) -> None:
    out = tmp_path / "s.json"
    words = ["slo-scale", url, *LOAD, "--rate", "20", "--requests", "60", "--scales", "0.01,1,2"]
    bench(*words, "-o", str(out))
    assert [share for _, share in Result.load(out).scales] == [0.0, 1.0, 1.0]
    ended = bench("compare", str(out), str(out), "--report", str(tmp_path / "c"))
    assert "per device" in ended.stdout


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["run", "URL", "--rate", "1", "--slo", "ttft=1"], "--duration or --requests"),
        (["run", "URL", "--rate", "0", "--requests", "1", "--slo", "ttft=1"], "--rate"),
        (["run", "URL", "--rate", "1", "--requests", "1", "--slo", "speed=1"], "--slo"),
        (["run", "URL", "--rate", "1", "--requests", "1", "--slo", "ttft=-1"], "ttft"),
        (["run", "URL", "--rate", "1", "--requests", "1", "--slo", "auto:ttft=2x"], "bench slo"),
        (["run", "URL", "--rate", "1", "--requests", "1", "--slo", "paper:no"], "paper:"),
        (["run", "URL", *LOAD, "--rate", "1", "--requests", "1", "--api", "voice"], "--api"),
        (["run", "URL", *LOAD, "--rate", "1", "--requests", "1", "-o", "/no/such/f"], "--output"),
        (["run", "URL", *LOAD, "--rate", "1", "--requests", "1", "--extra-body", "{"], "--extra"),
        (["run", "URL", *LOAD, "--rate", "1", "--requests", "1", "--arrivals", "x"], "--arrivals"),
        (["run", "URL", *LOAD, "--rate", "1", "--requests", "1", "--attainment", "2"], "--attain"),
        (["run", "URL", *LOAD, "--rate", "1", "--requests", "1", "--devices", "0"], "--devices"),
        (["run", "http://127.0.0.1:9", *LOAD, "--rate", "1", "--requests", "1"], "URL"),
        (["goodput", "URL", *LOAD, "--budget", "0"], "--budget"),
        (["sweep", "URL", *LOAD, "--rates", "3:1:1"], "--rates"),
        (["slo", "URL", "--slo", "ttft=1", "-o", "x"], "auto:"),
        (["compare", "/no/such/file"], "No such file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_use_names_the_field(url: str, words: list[str], named: str) -> None:
    ended = CliRunner().invoke(app, [url if word == "URL" else word for word in words])
    assert ended.exit_code == 2, ended.output
    assert named in ended.stderr


def test_rates() -> None:
    assert _numbers("0.5:2:0.5", "--rates") == [0.5, 1.0, 1.5, 2.0]
    assert _numbers("1,3", "--rates") == [1.0, 3.0]
    for text in ("", "a", "1:2:0", "0,1", "2:1:1"):
        with pytest.raises(ConfigError, match="--rates"):
            _numbers(text, "--rates")
