"""Profiles: what is measured, of which shapes, and what is concluded from it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from staffel.config import ConfigError, InstanceSpec, ModelSpec
from staffel.control.messages import KvRegion
from staffel.latency.model import Work, phase_of
from staffel.latency.profile import Profile, Slowdown
from staffel.model.commands import profile as command
from staffel.model.profile import (
    REST,
    Times,
    Wanted,
    Watch,
    conclude,
    fit_slowdown,
    fit_transfer,
    measure,
    share_cores,
    slowdowns,
)
from staffel.model.shapes import BatchShape, Limits, RoughCost, grid, make_plan
from tests.model.families import make_model

LIMITS = Limits(max_model_len=8192, blocks=1456, block_size=16, sequences=128)
COST = RoughCost(step=0.05, per_prompt_token=0.002, per_decode=0.004)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("model"))


def run(*words: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, list(words))
    return result.exit_code, result.output


# ---- what is measured


def test_the_grid_holds_enough_of_each_phase_whatever_the_model_takes() -> None:
    for length in (64, 192, 1024, 131072):
        shapes = grid(Limits(length, 1456, 16, 128))
        phases = [shape.phase for shape in shapes]
        assert min(phases.count(phase) for phase in ("prefill", "decode", "mixed")) >= 14
        assert all(shape.longest <= length for shape in shapes)


def test_the_grid_keeps_within_the_kv_cache() -> None:
    assert all(shape.blocks(16) <= 100 for shape in grid(Limits(8192, 100, 16, 128)))


def test_a_shape_says_what_work_it_is() -> None:
    shape = BatchShape(prompts=2, new=3, cached=10, decodes=4, context=7)
    assert shape.work == Work(6, 2 * (3 * 10 + 6), 2, 4, 28)
    assert shape.blocks(4) == 2 * 4 + 4 * 2
    assert shape.phase == phase_of(shape.work) == "mixed"


def test_a_short_budget_leaves_out_the_dearest_shapes() -> None:
    whole = make_plan(LIMITS, COST, 1000, beside=True)
    plan = make_plan(LIMITS, COST, whole.seconds / 2, beside=True)
    assert plan.seconds <= whole.seconds / 2 + 1e-9
    left_out = set(whole.shapes) - set(plan.shapes)
    kept = [shape for shape in plan.shapes if shape not in plan.reference]
    for phase in ("prefill", "decode", "mixed"):
        dearest = max(COST.seconds(shape) for shape in kept if shape.phase == phase)
        assert all(COST.seconds(shape) >= dearest for shape in left_out if shape.phase == phase)
    assert left_out


def test_a_budget_that_allows_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="--budget"):
        make_plan(LIMITS, COST, 1, beside=True)


def test_no_busy_neighbour_without_cores_for_it() -> None:
    assert share_cores(1, [3, 5]) == ((3,), (5,))
    assert share_cores(2, [3, 5, 7]) == ((3, 5), None)
    assert make_plan(LIMITS, COST, 1000, beside=False).neighbour == {}
    with pytest.raises(ConfigError, match="--threads"):
        share_cores(3, [0, 1])


# ---- what is concluded


def test_a_slowdown_has_a_fixed_part_and_a_share_of_the_mean_without_the_extremes() -> None:
    times = Times()
    for size in (8, 16, 32):
        shape = BatchShape(prompts=1, new=size)
        times.steps[REST, shape] = [size, size, 100 * size]
        # As often beside a neighbour that costs nothing as beside one that costs twice as much.
        longer = 2 * (3 + 0.1 * size)
        times.steps["decode", shape] = [size, size + longer] * 5 + [100 * size, 0.1]
        times.steps["prefill", shape] = [0.9 * size]
    found = slowdowns(times)["prefill"]
    assert found["decode"].fixed_s == pytest.approx(3)
    assert found["decode"].share == pytest.approx(0.1)
    assert found["prefill"] == Slowdown()


def test_a_slowdown_of_one_step_is_a_share() -> None:
    assert fit_slowdown([(1.0, 1.25)]) == Slowdown(share=0.25)


def test_short_steps_are_measured_more_often_beside_a_neighbour() -> None:
    plan = make_plan(LIMITS, COST, 1000, beside=True)
    often = Counter(plan.reference)
    assert often[max(often, key=COST.seconds)] == 1
    assert often[min(often, key=COST.seconds)] > 1
    assert Counter(plan.shapes)[plan.reference[0]] == 1


def test_a_copy_has_a_fixed_part_and_a_speed() -> None:
    copies = {blocks: [2e-4 + blocks * 1e6 / 5e9] * 3 for blocks in (1, 4, 16, 64)}
    found = fit_transfer(copies, block_bytes=1_000_000)
    assert found.bytes_per_second == pytest.approx(5e9)
    assert found.fixed_s == pytest.approx(2e-4)


def test_copies_that_say_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="copies"):
        fit_transfer({1: [1.0], 64: [0.01]}, block_bytes=1_000_000)


# ---- measuring, with stations that know what they should say


class FakeStation:
    """Takes the time that a line says; longer while its neighbour computes."""

    def __init__(self, neighbour: FakeStation | None = None) -> None:
        self.neighbour = neighbour
        self.busy: BatchShape | None = None

    def measure(self, shape: BatchShape) -> float:
        return self._alone(shape.work) * self._slowed()

    def copy(self, blocks: int) -> float:
        return 1e-4 + 1e-3 * blocks

    def repeat(self, shape: BatchShape) -> None:
        self.busy = shape

    def rest(self) -> None:
        self.busy = None

    def _alone(self, work: Work) -> float:
        return 0.03 + 0.002 * work.prompt_tokens + 0.004 * work.decodes

    def _slowed(self) -> float:
        busy = self.neighbour.busy if self.neighbour is not None else None
        return 1.0 if busy is None else {"prefill": 1.3, "decode": 1.5}[busy.phase]


REGION = KvRegion(
    kind="shm", pid=1, fd=1, size=1456 * 737280, slots=128, num_blocks=1456, layers=30,
    block_size=16, kv_heads=3, k_width=64, v_width=64, dtype="float32",
)  # fmt: skip


class InterruptedStation(FakeStation):
    """Somebody presses Ctrl-C while it measures for the n-th time."""

    def __init__(self, neighbour: FakeStation, left: int) -> None:
        super().__init__(neighbour)
        self.left = left

    def measure(self, shape: BatchShape) -> float:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return super().measure(shape)


def measured(watch: Watch = lambda done, total: None, *, interrupted: int | None = None) -> Profile:
    neighbour = FakeStation()
    station = FakeStation(neighbour)
    if interrupted is not None:
        station = InterruptedStation(neighbour, interrupted)
    plan = make_plan(LIMITS, COST, 1000, beside=True)
    times = measure(plan, station, neighbour, 3000, watch)  # type: ignore[arg-type]
    spec = ModelSpec(
        name="small", path="", model_type="llama", architecture="", vocab_size=9,
        max_model_len=8192, eos_ids=(),
    )  # fmt: skip
    wanted = Wanted(model=spec, spec=InstanceSpec(role="colocated"), threads=1, budget=3000)
    return conclude(wanted, REGION, times)


def test_what_the_stations_say_is_what_the_profile_says() -> None:
    found = measured()
    model = found.for_tp(1)
    assert model.step_seconds(Work.prefill(300)) == pytest.approx(0.63, rel=1e-3)
    assert model.step_seconds(Work.decode(9, 100)) == pytest.approx(0.066, rel=1e-3)
    assert found.kv_bytes_per_token == 46080
    assert found.transfer.seconds(3 * 737280) == pytest.approx(3.1e-3)
    assert found.slowdown["decode"]["prefill"].seconds(0.1) == pytest.approx(0.03)
    assert found.slowdown["decode"]["decode"].seconds(0.1) == pytest.approx(0.05)
    assert set(found.slowdown) == {"prefill", "decode", "mixed"}
    assert not found.interrupted


def test_progress_goes_to_its_end() -> None:
    told: list[tuple[float, float]] = []
    measured(lambda done, total: told.append((done, total)))
    assert told == sorted(told)
    assert told[-1][0] == pytest.approx(told[-1][1])


@pytest.mark.parametrize("after", [100, 101, 150, 333])
def test_an_interrupted_profile_keeps_what_is_measured(after: int) -> None:
    found = measured(interrupted=after)
    assert found.interrupted
    assert found.for_tp(1).step_seconds(Work.prefill(300)) == pytest.approx(0.63, rel=1e-3)


def test_interrupted_at_once_nothing_is_kept() -> None:
    with pytest.raises(ConfigError, match="interrupted too early"):
        measured(interrupted=1)


# ---- the whole of it, on a small model


def test_a_profile_loads_and_predicts(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    status, text = run(str(folder), "-o", str(file), "--kv-memory", "16MiB", "--budget", "0.05")
    assert status == 0, text
    found = Profile.load(file)
    model = found.for_tp(1)
    assert (found.model, found.dtype, found.device) == (folder.name, "float32", "cpu")
    assert found.kv_bytes_per_token == 2 * 2 * 2 * 8 * 4  # K and V, layers, heads, width, bytes
    assert 0 < model.step_seconds(Work.prefill(16)) < model.step_seconds(Work.prefill(150))
    assert model.step_seconds(Work.decode(8, 50)) > 0
    assert found.transfer.bytes_per_second > 1e6
    assert {error.phase for error in found.errors[1]} == {"prefill", "decode", "mixed"}
    assert not found.interrupted
    assert "profile:" in text


# ---- wrong use


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--tp", "1,2"], "--tp"),
        (["--device", "tpu"], "--device"),
        (["--dtype", "int3"], "--dtype"),
        (["--quantization", "int3"], "--quantization"),
        (["--quantization", "int8", "--dtype", "bfloat16"], "quantization"),
        (["--kv-memory", "much"], "--kv-memory"),
        (["--threads", "4096"], "--threads"),
        (["--max-model-len", "1"], "--max-model-len"),
        (["-o", "no/such/folder/profile.json"], "--output"),
    ],
)
def test_a_wrong_option_is_named(
    folder: Path, options: list[str], named: str, tmp_path: Path
) -> None:
    status, text = run(str(folder), "-o", str(tmp_path / "profile.json"), *options)
    assert status == 2
    assert named in text


def test_what_an_instance_refuses_is_said(folder: Path, tmp_path: Path) -> None:
    status, text = run(
        str(folder), "-o", str(tmp_path / "profile.json"), "--kv-memory", "1KiB", "--threads", "1"
    )
    assert status == 2
    assert "--kv-memory" in text
