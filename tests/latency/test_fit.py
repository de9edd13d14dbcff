"""A fit finds what made the times, and says honestly how far it is off."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from staffel.config import ConfigError
from staffel.latency.fit import Fit, Point, fit
from staffel.latency.model import FittedModel, Regime, Work, pairs
from staffel.latency.profile import FitError

PREFILL = Regime(constant=2e-3, per_prompt_token=1e-4, per_prompt_pair=3e-8, per_prompt=5e-4)
SMALL = Regime(up_to=16, constant=20e-3, per_decode=4e-5, per_decode_context=6e-7)
LARGE = Regime(constant=7e-3, per_decode=1.2e-3, per_decode_context=6e-7)
MIXED = Regime(
    constant=5e-3,
    per_prompt_token=1e-4,
    per_prompt_pair=3e-8,
    per_prompt=1e-4,
    per_decode=3e-4,
    per_decode_context=6e-7,
)
TRUTH = FittedModel(prefill=(PREFILL,), decode=(SMALL, LARGE), mixed=(MIXED,))


def batches() -> Iterator[Work]:
    for new in (16, 64, 128, 256, 512, 1024):
        for cached in (0, 256, 1024):
            for prompts in (1, 2, 4):
                yield Work.prefill(new, cached, prompts)
    for sequences in (1, 2, 4, 8, 12, 16, 24, 32, 48, 64):
        for context in (64, 256, 512, 1024, 2048):
            yield Work.decode(sequences, context)
    for new in (16, 64, 200):
        for sequences in (1, 8, 32):
            for context in (64, 512, 2048):
                yield Work(new, pairs(new, context), 1, sequences, sequences * context)
                yield Work(2 * new, 2 * pairs(new), 2, sequences, sequences * context)


def measured(noise: Callable[[], float] = lambda: 1.0) -> Fit:
    return fit([Point(work, TRUTH.step_seconds(work) * noise()) for work in batches()])


def worst(errors: tuple[FitError, ...]) -> float:
    return max(error.p90 for error in errors)


def test_exact_times_give_back_the_coefficients() -> None:
    found = measured().model.prefill
    assert len(found) == 1
    for name in ("constant", "per_prompt_token", "per_prompt_pair", "per_prompt"):
        assert getattr(found[0], name) == pytest.approx(getattr(PREFILL, name), rel=1e-4)


def test_a_kink_in_the_times_becomes_a_cut() -> None:
    found = measured().model.decode
    assert [regime.up_to for regime in found] == [16, None]
    assert found[0].per_decode == pytest.approx(SMALL.per_decode, rel=1e-3)
    assert found[1].constant == pytest.approx(LARGE.constant, rel=1e-3)


def test_without_a_kink_nothing_is_cut_though_times_are_noisy() -> None:
    draw = random.Random(0)
    found = measured(lambda: draw.gauss(1, 0.03)).model
    assert len(found.prefill) == 1
    assert len(found.mixed) == 1


def test_the_reported_error_is_about_the_noise() -> None:
    draw = random.Random(1)
    errors = measured(lambda: draw.uniform(0.9, 1.1)).errors
    assert worst(measured().errors) < 1e-3
    assert 0.03 < worst(errors) < 0.15
    assert {error.phase for error in errors} == {"prefill", "decode", "mixed"}


def test_every_point_is_judged_once_unseen() -> None:
    assert sum(error.points for error in measured().errors) == len(list(batches()))


def test_a_region_that_no_line_meets_shows_in_its_own_error() -> None:
    odd = {1: 3.0}
    points = [
        Point(work, TRUTH.step_seconds(work) * odd.get(work.decodes, 1.0)) for work in batches()
    ]
    regions = {error.region: error for error in fit(points).errors if error.phase == "decode"}
    assert regions["tokens 1"].median > 0.3
    assert regions["tokens 17-64"].median < 0.1


def test_coefficients_never_go_below_zero() -> None:
    draw = random.Random(2)
    model = measured(lambda: draw.uniform(0.5, 1.5)).model
    for regime in (*model.prefill, *model.decode, *model.mixed):
        assert min(getattr(regime, name) for name in regime.__struct_fields__[1:]) >= 0


def test_too_few_points_are_refused_by_phase() -> None:
    points = [Point(work, TRUTH.step_seconds(work)) for work in batches() if not work.prompts]
    with pytest.raises(ConfigError, match="0 measured prefill batches"):
        fit(points)


def test_a_time_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="above 0"):
        fit([Point(Work.decode(1, 1), 0.0)])
