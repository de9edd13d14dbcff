"""Throughput against speed: what a device yields, the faster each user is to be served."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from staffel.plan.candidates import Unit
from staffel.plan.question import Found, Option, Question
from staffel.plan.together import place_trial
from staffel.plan.trials import Seen, Simulator

LOADS = (0.05, 0.15, 0.3, 0.5, 0.7, 0.85, 1.0, 1.15)
"""Rates, as shares of the goodput."""
PLACEMENTS = 4
"""Of each kind, the best ones."""
_BLUE, _ORANGE, _GREY = "#0072B2", "#E69F00", "#777777"


@dataclass(frozen=True)
class Point:
    """A placement at a rate."""

    placement: str
    colocated: bool
    rate: float
    per_user: float
    """Tokens per second of one stream: 1 / median TPOT."""
    per_device: float
    """Output tokens per second and device."""
    in_time: bool
    """Whether enough requests met the TTFT bound."""


def frontier(question: Question, found: Found, simulator: Simulator) -> list[Point]:
    """The best placements of each kind, from nearly idle to beyond their goodput."""
    options = [*_distinct(found.disaggregated), *_distinct(found.colocated)]
    asked = [(option, load * option.unit_goodput) for option in options for load in LOADS]
    trials = [
        (
            place_trial(question, option.unit, option.unit_goodput, within_node=option.within_node),
            rate,
        )
        for option, rate in asked
    ]
    seen = simulator.at_rates(trials)
    return [_point(question, option, each) for (option, _), each in zip(asked, seen, strict=True)]


def _distinct(options: Sequence[Option]) -> list[Option]:
    """The first of each unit."""
    units: dict[Unit, Option] = {}
    for option in options:
        units.setdefault(option.unit, option)
    return list(units.values())[:PLACEMENTS]


def _point(question: Question, option: Option, seen: Seen) -> Point:
    return Point(
        placement=str(option.unit),
        colocated=option.unit.colocated,
        rate=seen.rate,
        per_user=seen.tokens_per_second_per_user,
        per_device=seen.output_tokens_per_second / option.unit.devices,
        in_time=seen.ttft_met >= question.attainment,
    )


def best_of(points: Sequence[Point]) -> list[Point]:
    """Those in time that no other one beats in both, the fastest first."""
    in_order = sorted(
        (point for point in points if point.in_time), key=lambda p: (-p.per_user, -p.per_device)
    )
    best: list[Point] = []
    for point in in_order:
        if not best or point.per_device > best[-1].per_device:
            best.append(point)
    return best


def draw(points: Sequence[Point], tpot: float | None, device: str, path: Path) -> None:
    """Write the picture as SVG."""
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    for colocated, colour, name in (
        (False, _BLUE, "prefill and decode apart"),
        (True, _ORANGE, "colocated"),
    ):
        _curve(axes, [p for p in points if p.colocated is colocated], colour, name)
    if tpot is not None:
        _mark(axes, 1 / tpot)
    axes.set(xlabel="tokens/s for each user", ylabel=f"output tokens/s for each {device}")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=9)
    out = io.StringIO()
    FigureCanvasSVG(figure).print_svg(out, metadata={"Date": None})
    path.write_text(out.getvalue())


def _curve(axes: Axes, points: Sequence[Point], colour: str, name: str) -> None:
    best = best_of(points)
    axes.plot(
        [p.per_user for p in best], [p.per_device for p in best], color=colour, marker="o",
        markersize=4, label=name,
    )  # fmt: skip
    late = [point for point in points if not point.in_time]
    axes.scatter(
        [p.per_user for p in late], [p.per_device for p in late], s=14, marker="x", color=colour,
        alpha=0.4, label=f"{name}: first tokens too late" if late else None,
    )  # fmt: skip


def _mark(axes: Axes, speed: float) -> None:
    axes.axvline(speed, color=_GREY, linestyle="--", linewidth=1)
    axes.annotate(
        f"SLO: {speed:.3g} tokens/s", (speed, 1), xycoords=("data", "axes fraction"), rotation=90,
        ha="right", va="top", color=_GREY, fontsize=8,
    )  # fmt: skip
