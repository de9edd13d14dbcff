"""A profile is a file that comes back as it was, or is refused with the field's name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from staffel.config import ConfigError
from staffel.latency.model import FittedModel, Regime, Work
from staffel.latency.profile import FitError, Profile, TransferModel

LINE = (Regime(constant=1.0),)
DECODE = (Regime(up_to=8, constant=2.0), Regime(constant=3.0, per_decode=0.5))
MODEL = FittedModel(prefill=LINE, decode=DECODE, mixed=(Regime(constant=9.0),))
PROFILE = Profile(
    model="m",
    dtype="float32",
    device="cpu",
    threads=1,
    versions={"torch": "2"},
    date="2026-01-01T00:00:00Z",
    kv_bytes_per_token=46080,
    models={1: MODEL},
    transfer=TransferModel(bytes_per_second=8e9, fixed_s=1e-3),
    errors={1: (FitError(phase="decode", region="tokens 1", points=3, median=0.01, p90=0.02),)},
)


def test_it_comes_back_as_it_was(tmp_path: Path) -> None:
    PROFILE.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == PROFILE


def test_the_regime_of_the_batch_is_taken() -> None:
    assert MODEL.step_seconds(Work.prefill(100)) == 1
    assert MODEL.step_seconds(Work.decode(8, 10)) == 2
    assert MODEL.step_seconds(Work.decode(10, 10)) == 8
    assert MODEL.step_seconds(Work(prompt_tokens=4, prompts=1, decodes=2)) == 9


def test_transfer_is_a_fixed_part_and_the_bytes() -> None:
    assert PROFILE.transfer.seconds(8_000_000) == pytest.approx(2e-3)


def test_a_degree_that_was_not_measured_is_refused() -> None:
    assert PROFILE.for_tp(1) is MODEL
    with pytest.raises(ConfigError, match="--tp 2"):
        PROFILE.for_tp(2)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("threads",), "two", "threads"),
        (("transfer", "bytes_per_second"), 0, "bytes_per_second"),
        (("models", "1", "decode"), [], "decode"),
        (("models", "1", "decode", 1, "up_to"), 4, "decode"),
        (("models", "1", "decode", 0, "up_to"), None, "decode"),
    ],
)
def test_a_wrong_file_is_refused_by_field(
    tmp_path: Path, path: tuple[str | int, ...], value: object, said: str
) -> None:
    file = tmp_path / "profile.json"
    PROFILE.save(file)
    content = json.loads(file.read_text())
    inner = content
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=said):
        Profile.load(file)


def test_no_file_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--profile"):
        Profile.load(tmp_path / "none.json")
