"""Fit of an engine's factors, and of how each group of rows was run, to measured rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares
from silicon_predict import USABLE_MEMORY, Factors, Setup, predict, roofline, steady_tpot
from silicon_rows import Row

from staffel.config import ConfigError
from staffel.latency.roofline import Efficiency

PRODUCT_BOUNDS = {
    "compute": (0.3, 0.9),
    "narrow_compute": (0.3, 0.9),
    "experts": (0.2, 1),
    "attention": (0.15, 0.8),
}
STEP_BOUNDS = {
    **PRODUCT_BOUNDS,
    "memory": (0.6, 0.95),
    "link": (0.2, 0.95),
    "collective_s": (3e-6, 1e-4),
    "layer_s": (1e-6, 1e-4),
    "expert_layer_s": (1e-6, 1e-4),
    "qk_norm_s": (1e-6, 1e-4),
    "step_s": (1e-4, 1e-2),
    "token_bytes": (5, 80),
}
"""Fitted to TPOT, as logarithms."""
PROMPT_BOUNDS = {
    **PRODUCT_BOUNDS,
    "eager_layer_s": (1e-5, 5e-3),
    "eager_expert_layer_s": (1e-5, 5e-3),
    "fixed_s": (1e-3, 0.2),
    "prompt_token_s": (1e-7, 1e-4),
}
"""Fitted to TTFT and TPOT by the loop."""
ANSWER_S = 9e-5
"""Where one process streams all answers: 11,000 tokens a second, with whichever engine."""
BUDGETS = {"trtllm": (8192,), "vllm": (8192, 2048), "sglang": (16384, 8192)}
GRID = {
    backend: tuple(
        Setup(budget=budget, slots_lost=lost, first_round=0.0 if lost else 0.1, answer_s=answer_s)
        for budget in budgets
        for lost in ((0, 1) if backend == "trtllm" else (0,))
        for answer_s in (0.0, ANSWER_S)
    )
    for backend, budgets in BUDGETS.items()
}
"""Ways in which an engine may have been run, the plain one first."""
TPOT_WEIGHT = 2.0
"""TTFT varies more from run to run."""
PRIOR_WEIGHT = 0.7
"""Holds on to the start what the rows say nothing of."""
MOST_ROWS = 60
MOST_CLIENTS = 128
"""Both keep the fit to a minute or two."""
PASSES = 3
MOST_EVALUATIONS = 15
_EFFICIENCIES = frozenset(Efficiency.__struct_fields__)


class Fitted(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an engine."""

    factors: Factors
    setups: dict[str, Setup]
    """By group of rows."""
    plain: Setup
    """Of groups that the fit did not see."""

    def setup_of(self, group: str) -> Setup:
        return self.setups.get(group, self.plain)


def fit_engine(backend: str, rows: Sequence[Row]) -> Fitted:
    """Set-ups, step times and what comes before the first token, by turns."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.group].append(row)
    factors = Factors()
    for _ in range(PASSES):
        setups = {
            group: min(GRID[backend], key=lambda setup: _ttft_spread(members, factors, setup))
            for group, members in groups.items()
        }
        factors = _fit_steps(rows, setups, factors)
        factors = _fit_prompts(_thinned(rows), setups, factors)
    return Fitted(factors=factors, setups=setups, plain=GRID[backend][0])


def _fit_steps(rows: Sequence[Row], setups: Mapping[str, Setup], start: Factors) -> Factors:
    """To TPOT, with `steady_tpot` in place of the loop, times the loop's ratio to it at `start`."""
    members = [
        (row, predict(row, start, setups[row.group]).tpot / steady_tpot(row, start.efficiency))
        for row in rows
        if _fits(row)
    ]

    def residuals(factors: Factors) -> list[float]:
        return [
            float(np.log(ratio * steady_tpot(row, factors.efficiency) / row.tpot))
            for row, ratio in members
        ]

    return _least_squares(residuals, STEP_BOUNDS, start, f_scale=0.1)


def _fits(row: Row) -> bool:
    """Whether all clients' requests fit in memory at a time."""
    try:
        tokens = roofline(row, row.tp, Factors()).kv_tokens(usable=USABLE_MEMORY)
    except ConfigError:
        return False
    return row.clients * (row.prompt_tokens + row.output_tokens) <= tokens


def _fit_prompts(rows: Sequence[Row], setups: Mapping[str, Setup], start: Factors) -> Factors:
    def residuals(factors: Factors) -> list[float]:
        return [
            error
            for ttft, tpot in _log_errors(rows, factors, setups)
            for error in (ttft, TPOT_WEIGHT * tpot)
        ]

    return _least_squares(residuals, PROMPT_BOUNDS, start, f_scale=0.1)


def _thinned(rows: Sequence[Row]) -> list[Row]:
    """Some of them, of all groups and sizes."""
    ordered = sorted(
        (row for row in rows if row.clients <= MOST_CLIENTS), key=lambda row: (row.group, row.id)
    )
    return ordered[:: -(-len(ordered) // MOST_ROWS)]


def _ttft_spread(rows: Sequence[Row], factors: Factors, setup: Setup) -> float:
    """Between quartiles of the log error: factors that are not fitted yet shift all rows alike."""
    errors = [ttft for ttft, _ in _log_errors(rows, factors, {rows[0].group: setup})]
    return float(np.subtract(*np.quantile(errors, [0.75, 0.25])))


def _log_errors(
    rows: Sequence[Row], factors: Factors, setups: Mapping[str, Setup]
) -> Iterator[tuple[float, float]]:
    """log(predicted / measured) of TTFT and TPOT; rows whose model does not fit are left out."""
    for row in rows:
        try:
            predicted = predict(row, factors, setups[row.group])
        except ConfigError:
            continue
        yield float(np.log(predicted.ttft / row.ttft)), float(np.log(predicted.tpot / row.tpot))


def _least_squares(
    residuals: Callable[[Factors], list[float]],
    bounds: Mapping[str, tuple[float, float]],
    start: Factors,
    f_scale: float,
) -> Factors:
    """Robust least squares over the factors named in `bounds`; the others stay."""
    low, high = np.log(np.array(list(bounds.values()))).T
    prior = _logs(Factors(), bounds)

    def with_prior(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        hold = PRIOR_WEIGHT * f_scale * (logs - prior)
        return np.concatenate([residuals(_changed(start, bounds, logs)), hold])

    found = least_squares(
        with_prior,
        np.clip(_logs(start, bounds), low + 1e-3, high - 1e-3),
        bounds=(low, high),
        loss="soft_l1",  # some rows are of set-ups that no grid has
        f_scale=f_scale,
        diff_step=0.01,  # the loop's times have small jumps
        max_nfev=MOST_EVALUATIONS,
    )
    return _changed(start, bounds, found.x)


def _logs(factors: Factors, names: Iterable[str]) -> NDArray[np.float64]:
    values = msgspec.structs.asdict(factors)
    values |= msgspec.structs.asdict(values.pop("efficiency"))
    return np.log([values[name] for name in names])


def _changed(start: Factors, names: Iterable[str], logs: NDArray[np.float64]) -> Factors:
    values = dict(zip(names, np.exp(logs).tolist(), strict=True))
    steps = {name: values.pop(name) for name in list(values) if name in _EFFICIENCIES}
    efficiency = msgspec.structs.replace(start.efficiency, **steps)
    return msgspec.structs.replace(start, efficiency=efficiency, **values)
