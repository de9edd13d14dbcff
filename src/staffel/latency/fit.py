"""From measured batches to a `FittedModel`, and how far it is off on batches it did not see.

Non-negative least squares on the relative error: a microsecond counts the more the shorter the
batch. Where one line does not do, a phase is cut in regimes by batch size; a cut is kept when it
makes the error on points that were held out smaller. The reported errors are of fits whose cuts,
too, were chosen without the points that they are judged by.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from staffel.config import ConfigError
from staffel.latency.model import FittedModel, Regime, Work, phase_of, regime_of
from staffel.latency.profile import FitError

FOLDS = 5
MAX_CUTS = 3
CUT_CANDIDATES = 12
WORTH = 0.9
"""A cut must bring the held-out error below this share of what it was."""
POINTS_PER_COEFFICIENT = 2

COLUMNS = {
    "prefill": ("constant", "per_prompt_token", "per_prompt_pair", "per_prompt"),
    "decode": ("constant", "per_decode", "per_decode_context"),
    "mixed": (
        "constant",
        "per_prompt_token",
        "per_prompt_pair",
        "per_prompt",
        "per_decode",
        "per_decode_context",
    ),
}
_PLACES = {name: place for place, name in enumerate(COLUMNS["mixed"])}
"""Of each coefficient's feature in (1, *work)."""


class Point(NamedTuple):
    """A measured batch."""

    work: Work
    seconds: float


class Fit(NamedTuple):
    model: FittedModel
    errors: tuple[FitError, ...]
    """By phase and batch size, on points that the fit did not see."""


def fit(points: Sequence[Point]) -> Fit:
    """Fit all three phases.

    Raises:
        ConfigError: a phase has fewer points than two per coefficient, or a time is not above 0.
    """
    if any(not point.seconds > 0 for point in points):
        raise ConfigError("points: every measured time must be above 0")
    phases = {phase: [p for p in points if phase_of(p.work) == phase] for phase in COLUMNS}
    for phase, members in phases.items():
        _check_enough(phase, members)
    regimes = {phase: fit_phase(phase, members) for phase, members in phases.items()}
    errors = [error for phase, members in phases.items() for error in _errors(phase, members)]
    return Fit(FittedModel(**regimes), tuple(errors))


def fit_phase(phase: str, points: Sequence[Point]) -> tuple[Regime, ...]:
    """Regimes of one phase, with the cuts that the held-out error asks for."""
    cuts: tuple[int, ...] = ()
    error = _held_out_error(phase, points, cuts)
    while len(cuts) < MAX_CUTS:
        trials = [tuple(sorted((*cuts, cut))) for cut in _candidates(phase, points, cuts)]
        if not trials:
            break
        least, best = min((_held_out_error(phase, points, trial), trial) for trial in trials)
        if least > WORTH * error:
            break
        cuts, error = best, least
    return _fit_with_cuts(phase, points, cuts)


def _check_enough(phase: str, points: Sequence[Point]) -> None:
    needed = POINTS_PER_COEFFICIENT * len(COLUMNS[phase])
    if len(points) < needed:
        raise ConfigError(
            f"points: {len(points)} measured {phase} batches are too few to fit; "
            f"measure {needed} at least"
        )


def _size(work: Work) -> int:
    return work.prompt_tokens + work.decodes


def _fold(work: Work) -> int:
    """By hash, so that repeated measurements of one batch stay together."""
    return zlib.crc32(repr(tuple(work)).encode()) % FOLDS


def _folds(points: Sequence[Point]) -> Iterable[tuple[list[Point], list[Point]]]:
    """(seen, held out) of each fold."""
    for fold in range(FOLDS):
        seen = [point for point in points if _fold(point.work) != fold]
        held_out = [point for point in points if _fold(point.work) == fold]
        if seen and held_out:
            yield seen, held_out


def _candidates(phase: str, points: Sequence[Point], cuts: tuple[int, ...]) -> list[int]:
    """Batch sizes at which one more cut leaves every regime enough points."""
    sizes = np.array([_size(point.work) for point in points])
    spread = np.quantile(sizes, np.linspace(0, 1, CUT_CANDIDATES), method="lower")
    fresh = [int(size) for size in np.unique(spread) if size not in cuts]
    needed = POINTS_PER_COEFFICIENT * len(COLUMNS[phase])
    return [cut for cut in fresh if _least_members(sizes, (*cuts, cut)) >= needed]


def _least_members(sizes: NDArray[np.int_], cuts: tuple[int, ...]) -> int:
    regimes = np.searchsorted(np.sort(cuts), sizes)
    return int(np.bincount(regimes, minlength=len(cuts) + 1).min())


def _held_out_error(phase: str, points: Sequence[Point], cuts: tuple[int, ...]) -> float:
    """Mean relative error over all folds."""
    errors = [
        error
        for seen, held_out in _folds(points)
        for error in _relative(_fit_with_cuts(phase, seen, cuts), held_out)
    ]
    return float(np.mean(errors)) if errors else float("inf")


def _fit_with_cuts(
    phase: str, points: Sequence[Point], cuts: tuple[int, ...]
) -> tuple[Regime, ...]:
    regimes, low = [], -1
    for cut in (*cuts, None):
        members = [p for p in points if low < _size(p.work) <= (cut or np.inf)]
        # a fold can leave a small regime without points: all of them are the next best
        regimes.append(_line(phase, members or points, cut))
        low = cut or low
    return tuple(regimes)


def _line(phase: str, points: Sequence[Point], up_to: int | None) -> Regime:
    """Least squares of (predicted / measured - 1), coefficients not below 0."""
    names = COLUMNS[phase]
    features = np.array([(1, *point.work) for point in points], dtype=float)
    features = features[:, [_PLACES[name] for name in names]]
    rows = features / np.array([[point.seconds] for point in points])
    scale = np.maximum(np.abs(rows).max(axis=0), 1e-300)  # columns differ by ten orders
    solution, _ = nnls(rows / scale, np.ones(len(points)))
    return Regime(up_to=up_to, **dict(zip(names, (solution / scale).tolist(), strict=True)))


def _relative(regimes: tuple[Regime, ...], points: Sequence[Point]) -> list[float]:
    return [abs(regime_of(regimes, _size(p.work)).seconds(p.work) / p.seconds - 1) for p in points]


def _errors(phase: str, points: Sequence[Point]) -> list[FitError]:
    regions: dict[int, list[float]] = {}
    for seen, held_out in _folds(points):
        regimes = fit_phase(phase, seen)
        for point, error in zip(held_out, _relative(regimes, held_out), strict=True):
            regions.setdefault(_region(_size(point.work)), []).append(error)
    return [_summary(phase, region, regions[region]) for region in sorted(regions)]


def _region(tokens: int) -> int:
    """Number of the region: 1, 2-4, 5-16, 17-64 ... tokens."""
    region = 0
    while 4**region < tokens:
        region += 1
    return region


def _summary(phase: str, region: int, errors: Sequence[float]) -> FitError:
    high, low = 4**region, 4 ** (region - 1) + 1
    return FitError(
        phase=phase,
        region=f"tokens {int(low)}-{high}" if region else "tokens 1",
        points=len(errors),
        median=float(np.median(errors)),
        p90=float(np.quantile(errors, 0.9)),
    )
