"""`staffel simulate` as it is typed: sources, placements, what it writes, what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from staffel.bench.results import Result as Measured
from staffel.latency.model import FittedModel, Regime
from staffel.latency.profile import Profile, TransferModel
from staffel.sim.commands import simulate

APP = typer.Typer()
APP.command()(simulate)
SHEET = ["--hardware", "a100-80g", "--model", "opt-13b", "--workload", "fixed:200,20"]
SLO = ["--slo", "ttft=0.25,tpot=0.1"]
FEW = ["--requests", "120"]


def run(*words: str, code: int = 0) -> Result:
    ended = CliRunner().invoke(APP, words)
    assert ended.exit_code == code, ended.output
    return ended


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    steps = (Regime(constant=0.004, per_prompt_token=2e-4, per_decode=1e-3),)
    made = Profile(
        model="tiny", dtype="float32", device="cpu", threads=1, versions={}, date="2026-01-01",
        kv_bytes_per_token=1000, models={1: FittedModel(prefill=steps, decode=steps, mixed=steps)},
        transfer=TransferModel(bytes_per_second=1e9),
    )  # fmt: skip
    made.save(tmp_path / "profile.json")
    return tmp_path / "profile.json"


def test_a_rate_on_a_hardware_sheet(tmp_path: Path) -> None:
    file, page = tmp_path / "run.json", tmp_path / "page"
    ended = run(*SHEET, *SLO, *FEW, "--rate", "4", "-o", str(file), "--report", str(page))
    assert "1P1D, simulated" in ended.output
    assert "decode-0" in ended.output
    assert "Handoff: median" in ended.output
    result = Measured.load(file)
    assert len(result.probes[0].records) == 120
    assert result.devices == 2
    assert (page / "index.html").stat().st_size > 50_000
    assert "</svg>" in (page / "inside.svg").read_text()


def test_the_file_says_what_went_on_inside(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    run(*SHEET, *SLO, *FEW, "--prefill", "2", "--decode", "1", "--rate", "4", "-o", str(file))
    inside = json.loads(file.read_bytes())["inside"]
    assert [one["name"] for one in inside["instances"]] == ["prefill-0", "prefill-1", "decode-0"]
    assert all(0 < one["utilisation"] <= 1 for one in inside["instances"])
    assert inside["instances"][2]["samples"]
    assert inside["handoff"]["50"] >= inside["read"]["50"] > 0


def test_the_same_words_give_the_same_file(tmp_path: Path) -> None:
    wrote = []
    for name in "ab":
        run(*SHEET, *SLO, *FEW, "--rate", "4", "-o", str(tmp_path / name))
        whole = json.loads((tmp_path / name).read_bytes())
        wrote.append({key: whole[key] for key in whole if key not in ("started", "command")})
    assert wrote[0] == wrote[1]


def test_a_goodput_search_by_a_profile(profile: Path, tmp_path: Path) -> None:
    file = tmp_path / "goodput.json.gz"
    ended = run(
        "--profile", str(profile), "--colocated", "1", "--policy", "prefill-first", *SLO, *FEW,
        "--workload", "fixed:100,10", "--goodput", "-o", str(file),
    )  # fmt: skip
    assert "goodput" in ended.output
    assert "Rates that were tried" in ended.output
    found = Measured.load(file).goodput
    assert found is not None
    assert 0 < found.value <= found.high


def test_cpu_time_of_others_lengthens_steps(profile: Path, tmp_path: Path) -> None:
    words = ["--profile", str(profile), "--colocated", "1", *SLO, *FEW, "--rate", "10",
             "--workload", "fixed:100,10"]  # fmt: skip
    tpots = []
    for cost in ("0,0,0", "0,4,1"):
        file = tmp_path / "run.json"
        run(*words, "--host-cpu", cost, "-o", str(file))
        records = Measured.load(file).probes[0].records
        tpots.append(min(record.tpot for record in records))
    assert tpots[1] == pytest.approx(tpots[0] + 0.005, rel=0.1)


def test_a_placement_file_and_a_slow_link(profile: Path, tmp_path: Path) -> None:
    placement = tmp_path / "placement.yaml"
    placement.write_text("instances:\n  - {role: prefill, count: 2}\n  - {role: decode}\n")
    words = ["--profile", str(profile), "--placement", str(placement), *SLO, *FEW, "--rate", "5"]
    file = tmp_path / "run.json"
    handoffs = []
    for link in ("1GB/s", "1MB/s"):
        run(*words, "--link", link, "-o", str(file))
        handoffs.append(json.loads(file.read_bytes())["inside"]["handoff"]["50"])
    assert handoffs[1] > 10 * handoffs[0]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--rate", "1"], "give either --profile FILE or --hardware"),
        ([*SHEET], "give either --rate R or --goodput"),
        ([*SHEET, "--rate", "1", "--goodput"], "give either --rate R or --goodput"),
        ([*SHEET, "--rate", "-1"], "--rate"),
        (["--hardware", "a100-80g", "--rate", "1"], "--model: is needed"),
        ([*SHEET, "--rate", "1", "--policy", "fifo"], "--policy: 'fifo'"),
        ([*SHEET, "--rate", "1", "--policy", "chunked"], "add --colocated N"),
        ([*SHEET, "--rate", "1", "--mla", "zipped"], "--mla: 'zipped'"),
        ([*SHEET, "--rate", "1", "--kv-memory", "900GiB"], "more than fits beside the weights"),
        ([*SHEET, "--rate", "1", "--decode", "0"], "no decode instance"),
        ([*SHEET, "--rate", "1", "--placement", "p.yaml", "--decode", "2"], "--decode"),
        ([*SHEET, "--rate", "1", "--link", "fast"], "--link"),
        ([*SHEET, "--rate", "1", "--host-cpu", "fast"], "--host-cpu: 'fast'"),
        ([*SHEET, "--rate", "1", "-o", "/nowhere/at/all.json"], "can't be written"),
    ],
)
def test_wrong_use_is_named(words: list[str], named: str) -> None:
    ended = CliRunner().invoke(APP, [*words, *SLO, *FEW])
    assert ended.exit_code == 2
    assert named in ended.output


def test_a_placement_file_says_how_much_of_a_gpu_is_used(tmp_path: Path) -> None:
    """The model's weights need 26 GB of the 80."""
    placement = tmp_path / "placement.yaml"
    words = ["--placement", str(placement), *SHEET, *SLO, *FEW, "--rate", "1"]
    one = "instances: [{role: colocated, device: cuda, gpu_memory_utilization: %s}]"
    placement.write_text(one % 0.5)
    run(*words)
    placement.write_text(one % 0.25)
    assert "21 GB usable" in " ".join(run(*words, code=2).output.replace("│", " ").split())


def test_options_of_a_sheet_do_not_go_with_a_profile(profile: Path) -> None:
    ended = run("--profile", str(profile), "--rate", "1", "--model", "opt-13b", *SLO, code=2)
    assert "--model: goes with --hardware" in ended.output


def test_a_placement_for_what_was_not_measured_is_refused(profile: Path, tmp_path: Path) -> None:
    placement = tmp_path / "placement.yaml"
    placement.write_text("instances:\n  - {role: colocated, threads: 2}\n")
    words = ["--profile", str(profile), "--placement", str(placement), "--rate", "1", *SLO]
    assert "threads: the placement has 2" in run(*words, code=2).output


def test_no_torch_is_loaded() -> None:
    program = (
        "import sys, staffel.sim.session, staffel.sim.commands, staffel.sim.pictures; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
