"""A measurement as one self-contained HTML page, and several of them side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment

from staffel.bench import pictures
from staffel.bench.compare import Row, comparison
from staffel.bench.results import Interval, Probe, Result
from staffel.bench.summary import Summary, summarise
from staffel.config import SLO

_NAMES = {
    "ttft": "TTFT",
    "tpot": "TPOT",
    "itl_p99": "ITL P99 of a request",
    "e2e": "E2E latency",
    "ema": "EMA latency",
}

_INTERFERENCE = "Tokens of running streams while prompts arrive"
_GAPS = (
    "Times in ms; TTFT and longest gap are medians over the prompts, the other gaps are means. A "
    "gap between two tokens of a stream counts as during if a prompt was being computed in it, "
    "from its sending to its first token."
)
_SCALES = "Attainment against SLO scale"

Table = list[list[str]]
"""The first row is the head."""


@dataclass
class Section:
    """A part of the page."""

    title: str
    text: str = ""
    table: Table = field(default_factory=list)
    pictures: list[str] = field(default_factory=list)
    """SVG text."""


def result_tables(result: Result) -> list[tuple[str, Table]]:
    """Titles and tables for a terminal; the title alone where it says everything."""
    parts: list[tuple[str, Table]] = [(result_line(result), [])]
    if result.interference:
        parts.append((_INTERFERENCE, interference_table(result)))
    if result.scales:
        parts.append((_SCALES, scales_table(result)))
    if result.slo is None:
        return parts
    if len(result.probes) > 1:
        parts.append(("Attainment against rate", rates_table(result, result.slo)))
    probe = shown_probe(result)
    if probe is not None:
        summary = summarise(probe, result.slo)
        parts.append((f"At {probe.rate:.3g} requests/s, ms", measures_table(summary, result.slo)))
    return parts


def result_line(result: Result) -> str:
    """The answer in a sentence."""
    if result.kind == "slo":
        return f"SLO {result.slo}"
    if result.kind == "interference":
        return f"{result.label}: {result.interference[0].streams} streams, prompts meanwhile"
    figures = _headline(result, shown_probe(result))
    if not figures:
        return f"{result.label}: nothing was measured"
    return f"{result.label}: " + ", ".join(f"{value} {text}" for value, text in figures)


def write_report(result: Result, folder: Path) -> Path:
    """The page of one measurement: index.html in `folder`."""
    page = _render(
        title=f"{result.label}: {result.kind}",
        subtitle=_subtitle(result),
        headline=_headline(result, shown_probe(result)),
        notes=_notes(result),
        sections=_sections(result),
        command=result.command,
        facts=_facts(result),
    )
    return _write(page, folder)


def _subtitle(result: Result) -> str:
    where = f"{result.model} at {result.url}"
    return where if result.slo is None else f"{where}, {result.workload}, SLO {result.slo}"


def _sections(result: Result) -> list[Section]:
    parts = []
    if result.interference:
        picture = pictures.disturbed_gaps(result.interference)
        parts.append(Section(_INTERFERENCE, _GAPS, interference_table(result), [picture]))
    if result.scales:
        picture = pictures.attainment_against_scale(result.scales, result.target)
        parts.append(Section(_SCALES, table=scales_table(result), pictures=[picture]))
    if result.slo is None:
        return parts
    if len(result.probes) > 1:
        picture = pictures.attainment_against_rate([result])
        text = "Times in ms. Hollow marks in the picture: not in steady state."
        table = rates_table(result, result.slo)
        parts.append(Section("Attainment against rate", text, table, [picture]))
    probe = shown_probe(result)
    return parts if probe is None else parts + _one_rate(probe, result.slo)


def write_comparison(results: Sequence[Result], folder: Path) -> Path:
    """The page of several measurements of the same workload under the same SLO."""
    rows = comparison(results)
    best = rows[0]
    page = _render(
        title="Goodput per device, side by side",
        subtitle=f"{results[0].workload}, SLO {results[0].slo}, target {results[0].target:.0%}",
        headline=[(f"{_rate(row.per_device)} req/s", row.label) for row in rows],
        notes=[note for result in results for note in _notes(result)],
        sections=[
            Section("Side by side", f"Ratios are to {best.label}.", comparison_table(rows)),
            Section(
                "Attainment against rate per device",
                pictures=[pictures.attainment_against_rate(results)],
            ),
        ],
        command=" ; ".join(result.command for result in results),
        facts=[(result.label, f"{result.started}, {result.url}") for result in results],
    )
    return _write(page, folder)


def shown_probe(result: Result) -> Probe | None:
    """The probe whose requests are shown: the highest rate that met the target, else the lowest."""
    rates = _by_rate(result)
    good = [probe for probe in rates if probe.attainment.value >= result.target]
    return good[-1] if good else next(iter(rates), None)


def comparison_table(rows: Sequence[Row]) -> Table:
    head = ["", "goodput, req/s", "95 % interval", "devices", "per device", "ratio"]
    return [head] + [
        [
            row.label,
            "none" if row.goodput is None else _rate(row.goodput),
            _between(row.goodput),
            str(row.devices),
            _rate(row.per_device),
            "-" if row.ratio is None else f"{row.ratio.value:.2f} ({_between(row.ratio)})",
        ]
        for row in rows
    ]


def _headline(result: Result, probe: Probe | None) -> list[tuple[str, str]]:
    figures = []
    if result.kind == "goodput" and result.goodput is None:
        # The figures of some probe on the way would be taken for the answer.
        return [("no goodput found", "(interrupted)" if result.interrupted else "(see the notes)")]
    if result.goodput is not None:
        found = result.goodput
        figures.append((f"{found.value:.3g} req/s", f"goodput ({_between(found)})"))
        figures.append((f"{found.value / result.devices:.3g} req/s", "goodput per device"))
    if probe is not None and result.slo is not None:
        summary = summarise(probe, result.slo)
        figures.append((f"{summary.throughput:.3g} req/s", f"throughput at {probe.rate:.3g} req/s"))
        figures.append((f"{summary.good:.3g} req/s", "of them within the SLO"))
        figures.append(
            (f"{probe.attainment.value:.1%}", f"attainment (target {result.target:.0%})")
        )
    return figures


def _notes(result: Result) -> list[str]:
    notes = [f"{result.label}: {note}" for note in result.notes]
    if result.interrupted:
        notes.append(f"{result.label}: interrupted; this is what there was.")
    for probe in result.probes:
        if not probe.generator.kept_up:
            notes.append(
                f"{result.label}, {probe.rate:.3g} req/s: the load generator could not keep up."
            )
        if probe.unsteady:
            at = f"{result.label}, {probe.rate:.3g} req/s"
            notes.append(f"{at}: not in steady state: {probe.unsteady}.")
    return notes


def rates_table(result: Result, slo: SLO) -> Table:
    head = ["req/s", "met SLO", "95 % interval", "verdict", "sent", "req/s done", "in SLO"]
    head += ["TTFT P50", "P90", "TPOT P50", "P90", "steady"]
    return [head] + [_rate_row(probe, summarise(probe, slo)) for probe in _by_rate(result)]


def interference_table(result: Result) -> Table:
    head = ["prompt tokens", "TTFT", "ITL alone", "ITL during", "times", "longest gap", "times"]
    return [head] + [
        [
            str(row.prompt_tokens),
            _ms(row.ttft),
            _ms(row.itl_alone),
            _ms(row.itl_during),
            f"{row.itl_during / row.itl_alone:.2f}",
            _ms(row.itl_worst),
            f"{row.itl_worst / row.itl_alone:.2f}",
        ]
        for row in result.interference
    ]


def scales_table(result: Result) -> Table:
    return [["SLO times", "attainment"]] + [[f"{s:g}", f"{a:.1%}"] for s, a in result.scales]


def _by_rate(result: Result) -> list[Probe]:
    return sorted(result.probes, key=lambda probe: probe.rate)


def _rate_row(probe: Probe, summary: Summary) -> list[str]:
    share = probe.attainment
    ttft, tpot = summary.percentiles["ttft"], summary.percentiles["tpot"]
    return [
        f"{probe.rate:.3g}",
        f"{share.value:.1%}",
        f"{share.low:.1%} to {share.high:.1%}",
        probe.verdict or "-",
        str(summary.requests),
        f"{summary.throughput:.3g}",
        f"{summary.good:.3g}",
        _ms(ttft[50]),
        _ms(ttft[90]),
        _ms(tpot[50]),
        _ms(tpot[90]),
        "no" if probe.unsteady else "yes",
    ]


def measures_table(summary: Summary, slo: SLO) -> Table:
    """Percentiles of TTFT, TPOT and whatever the SLO bounds, in ms."""
    bounds = slo.bounds()
    return [["", "P50", "P90", "P99", "SLO", "missed by"]] + [
        [
            _NAMES[name],
            *(_ms(summary.percentiles[name][p]) for p in (50, 90, 99)),
            _ms(bounds.get(name)),
            str(summary.missed.get(name, 0)) if name in bounds else "-",
        ]
        for name in _shown(slo)
    ]


def _shown(slo: SLO) -> list[str]:
    return [name for name in _NAMES if name in ("ttft", "tpot") or name in slo.bounds()]


def _one_rate(probe: Probe, slo: SLO) -> list[Section]:
    summary = summarise(probe, slo)
    curves = [
        pictures.distribution(probe, name, slo.bounds().get(name), _NAMES[name])
        for name in _shown(slo)
        if summary.percentiles[name][50] is not None
    ]
    failed = summary.missed.get("failed", 0)
    text = f"{summary.requests} requests counted, {failed} failed. Times in ms."
    title = f"At {probe.rate:.3g} requests/s"
    sections = [Section(title, text, measures_table(summary, slo), curves)]
    if summary.errors:
        rows = [[error, str(count)] for error, count in sorted(summary.errors.items())]
        sections.append(Section("Errors", table=[["error", "requests"], *rows]))
    over_time = [pictures.requests_over_time(probe, slo), pictures.queueing(probe)]
    return [*sections, Section("Over time", pictures=over_time)]


def _facts(result: Result) -> list[tuple[str, str]]:
    probe = shown_probe(result)
    facts = [
        ("started", result.started),
        ("model", result.model),
        ("workload", result.workload),
        ("arrivals", f"{result.arrivals}, seed {result.seed}"),
        ("SLO", f"{result.slo}, target {result.target:.0%}"),
        ("devices", str(result.devices)),
    ]
    if probe is not None:
        generator = probe.generator
        facts.append(("load generator", f"{generator.processes} processes"))
        facts.append(("its lateness P99", f"{1e3 * generator.lateness_p99:.2f} ms"))
        facts.append(("its CPU", f"{generator.cpu_share:.0%} of a core"))
        kinds = sorted({record.tokens_from for record in probe.counted()})
        facts.append(("tokens counted from", ", ".join(kinds)))
    return facts + sorted(result.versions.items())


def _render(**parts: object) -> str:
    template = (files("staffel.bench") / "page.html").read_text()
    return Environment(autoescape=True).from_string(template).render(**parts)


def _write(page: str, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "index.html"
    path.write_text(page)
    return path


def _rate(rate: Interval | None) -> str:
    return "-" if rate is None else f"{rate.value:.3g}"


def _between(found: Interval | None) -> str:
    return "-" if found is None else f"{found.low:.3g} to {found.high:.3g}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.4g}"
