"""Pictures of a measurement, as SVG text. Colours are safe for colour-blind readers."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from staffel.bench.records import Record
from staffel.bench.results import Interference, Probe, Result
from staffel.bench.summary import in_flight, values
from staffel.config import SLO

# Okabe and Ito's palette.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY, GREY = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#777777",
)  # fmt: skip
SERIES = (BLUE, ORANGE, GREEN, PURPLE, SKY, RED)
OUTCOMES = {
    "met all": GREEN, "ttft": ORANGE, "tpot": PURPLE, "itl_p99": SKY, "e2e": BLUE, "ema": GREY,
    "failed": RED, "unfinished": "black",
}  # fmt: skip
_MARKS = {"above": "^", "below": "v", "unclear": "o", None: "o"}


def _picture(draw: Callable[[Axes], None], size: tuple[float, float] = (7.2, 3.6)) -> str:
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    draw(axes)
    out = io.StringIO()
    FigureCanvasSVG(figure).print_svg(out, metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def attainment_against_rate(results: Sequence[Result]) -> str:
    """Every probe with its interval, the target line, and the goodput where it was found."""

    def draw(axes: Axes) -> None:
        for colour, result in zip(_colours(len(results)), results, strict=True):
            _curve(axes, result, colour, per_device=len(results) > 1)
        for target in sorted({result.target for result in results}):
            axes.axhline(100 * target, color=GREY, linestyle="--", linewidth=1)
            axes.annotate(
                f"target {target:.0%}", (1, 100 * target), xycoords=("axes fraction", "data"),
                ha="right", va="bottom", color=GREY, fontsize=8,
            )  # fmt: skip
        axes.set(ylim=(-3, 103), ylabel="requests that met the SLO, %")
        axes.set_xlabel("rate per device, requests/s" if len(results) > 1 else "rate, requests/s")
        axes.set_xlim(left=0)
        if len(results) > 1:
            axes.legend(frameon=False, fontsize=9, loc="lower left")

    return _picture(draw)


def _colours(count: int) -> list[str]:
    return [SERIES[i % len(SERIES)] for i in range(count)]


def _curve(axes: Axes, result: Result, colour: str, *, per_device: bool) -> None:
    unit = result.devices if per_device else 1
    probes = sorted(result.probes, key=lambda probe: probe.rate)
    rates = [probe.rate / unit for probe in probes]
    shares = [100 * probe.attainment.value for probe in probes]
    axes.plot(rates, shares, color=colour, alpha=0.4, linewidth=1, label=result.label)
    for probe, rate in zip(probes, rates, strict=True):
        share = probe.attainment
        axes.errorbar(
            rate, 100 * share.value,
            yerr=[[100 * (share.value - share.low)], [100 * (share.high - share.value)]],
            color=colour, marker=_MARKS[probe.verdict], markersize=5, capsize=2, linewidth=1,
            markerfacecolor="white" if probe.unsteady else colour,
        )  # fmt: skip
    if result.goodput is not None:
        found = result.goodput
        axes.axvspan(found.low / unit, found.high / unit, color=colour, alpha=0.12, linewidth=0)
        axes.axvline(found.value / unit, color=colour, linewidth=1.5)


def distribution(probe: Probe, measure: str, bound: float | None, title: str) -> str:
    """Share of requests up to each value, with the SLO's line."""

    def draw(axes: Axes) -> None:
        sample = np.sort(values(probe.counted(), measure)) * 1e3
        shares = 100 * np.arange(1, len(sample) + 1) / max(len(sample), 1)
        axes.step(sample, shares, where="post", color=BLUE)
        if bound is not None:
            axes.axvline(1e3 * bound, color=RED, linestyle="--", linewidth=1.2)
            axes.annotate(
                f"SLO {1e3 * bound:g} ms", (1e3 * bound, 2), rotation=90, color=RED, fontsize=8,
                ha="right", va="bottom",
            )  # fmt: skip
        axes.set(xlabel=f"{title}, ms", ylabel="requests, %", ylim=(0, 102))
        axes.set_xlim(left=0)

    return _picture(draw, (4.7, 3.0))


def requests_over_time(probe: Probe, slo: SLO) -> str:
    """Each request at its scheduled arrival, coloured by the first objective it missed."""

    def draw(axes: Axes) -> None:
        for name, group in _by_outcome(probe.counted(), slo).items():
            axes.scatter(
                [record.scheduled for record in group],
                [_height(record) for record in group],
                s=9, color=OUTCOMES[name], label=f"{name} ({len(group)})", linewidths=0,
            )  # fmt: skip
        if slo.ttft is not None:
            axes.axhline(1e3 * slo.ttft, color=RED, linestyle="--", linewidth=1)
        axes.set(xlabel="scheduled arrival, s", ylabel="TTFT, ms (failed: 0)")
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, fontsize=8, ncols=4, loc="upper left")

    return _picture(draw)


def _by_outcome(records: Sequence[Record], slo: SLO) -> dict[str, list[Record]]:
    groups: dict[str, list[Record]] = {}
    for record in records:
        missed = record.missed(slo)
        groups.setdefault(missed[0] if missed else "met all", []).append(record)
    return groups


def _height(record: Record) -> float:
    return 0.0 if record.error is not None or record.ttft is None else 1e3 * record.ttft


def queueing(probe: Probe) -> str:
    """Requests in flight over time, and the window that counts."""

    def draw(axes: Axes) -> None:
        times, counts = in_flight(probe.records)
        axes.step(times, counts, where="post", color=BLUE, linewidth=1.2)
        start, end = probe.window
        axes.axvspan(start, end, color=GREEN, alpha=0.08, linewidth=0)
        axes.annotate("counted", (start, 1), xycoords=("data", "axes fraction"), va="top",
                      fontsize=8, color=GREEN)  # fmt: skip
        axes.set(xlabel="time, s", ylabel="requests in flight")
        axes.set_ylim(bottom=0)

    return _picture(draw)


def attainment_against_scale(points: Sequence[tuple[float, float]], target: float) -> str:
    """The paper's lower row: how tight the SLO may get (smaller scales are tighter)."""

    def draw(axes: Axes) -> None:
        axes.plot([s for s, _ in points], [100 * a for _, a in points], color=BLUE, marker="o")
        axes.axhline(100 * target, color=GREY, linestyle="--", linewidth=1)
        axes.set(xlabel="SLO scale", ylabel="requests that met it, %", ylim=(-3, 103))
        axes.invert_xaxis()

    return _picture(draw)


def disturbed_gaps(rows: Sequence[Interference]) -> str:
    """Gaps between tokens alone, during a prompt, and at worst, by prompt length."""

    def draw(axes: Axes) -> None:
        places = np.arange(len(rows))
        for shift, colour, name, label in (
            (-0.25, GREEN, "itl_alone", "no prompt"),
            (0.0, ORANGE, "itl_during", "during a prompt"),
            (0.25, RED, "itl_worst", "longest gap"),
        ):
            heights = [1e3 * getattr(row, name) for row in rows]
            bars = axes.bar(places + shift, heights, 0.24, color=colour, label=label)
            axes.bar_label(bars, fmt="%.0f", fontsize=8)
        axes.set_xticks(places, [str(row.prompt_tokens) for row in rows])
        axes.set(xlabel="tokens of the prompt", ylabel="gap between tokens, ms")
        axes.legend(frameon=False, fontsize=9)

    return _picture(draw)
