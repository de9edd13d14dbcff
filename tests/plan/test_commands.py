from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from staffel.config import Placement
from staffel.latency.profile import Profile, TransferModel
from staffel.plan import commands
from tests.plan.test_simulated import SMALL

app = typer.Typer()
app.command()(commands.plan)
app.add_typer(commands.app, name="reproduce")


def run(*words: str, place: Path):
    return CliRunner().invoke(app, ["plan", *words, "--placement", str(place / "placement.yaml")])


@pytest.fixture
def profile(tmp_path) -> str:
    Profile(
        model="HuggingFaceTB/SmolLM2-135M-Instruct", dtype="float32", device="cpu", threads=1,
        versions={}, date="2026-01-01", kv_bytes_per_token=46_080, models={1: SMALL}, cores=2,
        transfer=TransferModel(bytes_per_second=4e9, fixed_s=1e-4),
    ).save(tmp_path / "profile.json")  # fmt: skip
    return str(tmp_path / "profile.json")


def test_a_profile_of_two_cores_becomes_a_placement_for_them(profile, tmp_path):
    words = ("--profile", profile, "--workload", "fixed:40,20", "--slo", "ttft=1,tpot=0.2")
    done = run(*words, "--executable", "--requests", "50", place=tmp_path)
    assert done.exit_code == 0, done.output
    assert "requests/s per core" in done.output
    placement = Placement.load(tmp_path / "placement.yaml")
    assert sum(spec.count for spec in placement.instances) == 2
    assert all(spec.threads == 1 for spec in placement.instances)


def test_what_server_and_clients_take_lowers_the_goodput(profile, tmp_path):
    def goodput(cost: str) -> float:
        file = tmp_path / "plan.json"
        words = ("--profile", profile, "--workload", "fixed:40,20", "--slo", "ttft=1,tpot=0.2")
        more = ("--executable", "--requests", "50", "--host-cpu", cost, "-o", str(file))
        assert run(*words, *more, place=tmp_path).exit_code == 0
        return json.loads(file.read_text())["recommended"]["goodput"]

    assert goodput("10,5,1") < 0.9 * goodput("0,0,0")


SHEET = ("--hardware", "a100-80g", "--model", "opt-13b")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ((), "--profile"),
        (("--hardware", "abacus", "--model", "opt-13b"), "--hardware"),
        (("--hardware", "a100-80g"), "--model"),
        (("--hardware", "l4", "--model", "opt-175b", "--gpus-per-node", "1"), "fits on no"),
        ((*SHEET, "--affinity", "some"), "--affinity"),
        ((*SHEET, "--mla", "folded"), "--mla"),
        ((*SHEET, "--dtype", "int3"), "--dtype"),
        ((*SHEET, "--inter-node", "fast"), "--inter-node"),
        ((*SHEET, "--workload", "nothing"), "--workload"),
        ((*SHEET, "--attainment", "1"), "--attainment"),
        ((*SHEET, "--rate", "0"), "--rate"),
        ((*SHEET, "--kv-memory", "1GiB"), "--kv-memory"),
        ((*SHEET, "--executable", "--nodes", "2"), "--executable"),
    ],
)
def test_wrong_use_is_said_in_a_line(words, named, tmp_path):
    done = run(*words, "--slo", "ttft=1,tpot=0.2", place=tmp_path)
    assert done.exit_code == 2
    assert named in done.output
    assert not (tmp_path / "placement.yaml").exists()


def test_rows_that_are_not_there_are_refused():
    done = CliRunner().invoke(app, ["reproduce", "distserve", "--only", "opt-7b"])
    assert done.exit_code == 2
    assert "opt-13b" in done.output


def test_the_commands_load_without_torch_or_what_plans():
    code = (
        "import sys, staffel.plan.commands, staffel.plan.inputs, staffel.plan.reproduce\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    light = "import sys, staffel.plan.commands; assert 'scipy' not in sys.modules"
    subprocess.run([sys.executable, "-c", light], check=True)
