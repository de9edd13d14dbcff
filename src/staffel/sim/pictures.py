"""What went on inside a simulation, as SVG text."""

from __future__ import annotations

import io

from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from staffel.bench.pictures import SERIES
from staffel.sim.outcome import Outcome


def occupancy(outcome: Outcome) -> str:
    """Over time: KV memory in use, requests that run, and requests that wait, by instance."""
    figure = Figure(figsize=(7.2, 6.4), layout="constrained")
    memory, running, waiting = figure.subplots(3, 1, sharex=True)
    for colour, use in zip(_colours(len(outcome.instances)), outcome.instances, strict=True):
        times = [sample.at for sample in use.samples]
        for axes, heights in (
            (memory, [100 * sample.used for sample in use.samples]),
            (running, [sample.running for sample in use.samples]),
            (waiting, [sample.waiting + sample.pinned for sample in use.samples]),
        ):
            axes.plot(times, heights, color=colour, linewidth=1, label=use.name)
    times = [at for at, _ in outcome.queue]
    waiting.plot(times, [count for _, count in outcome.queue], color="black", linewidth=1,
                 label="router")  # fmt: skip
    _label(memory, "KV in use, %")
    _label(running, "requests that run")
    _label(waiting, "that wait or are pinned")
    waiting.set_xlabel("time, s")
    out = io.StringIO()
    FigureCanvasSVG(figure).print_svg(out, metadata={"Date": None})
    return out.getvalue()


def _label(axes: Axes, text: str) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.set(ylabel=text)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8, ncols=4, loc="upper left")


def _colours(count: int) -> list[str]:
    return [SERIES[i % len(SERIES)] for i in range(count)]
