"""`staffel plan` and `staffel reproduce`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from staffel.config import ConfigError
from staffel.terminal import option, or_error, out, print_table

if TYPE_CHECKING:  # what plans is loaded when something is planned
    from staffel.plan.inputs import Prepared
    from staffel.plan.published import Published
    from staffel.plan.result import Plan, Row

_HARDWARE, _WORKLOAD, _RESULT = "Hardware and model", "Workload", "Result"


def plan(
    slo: Annotated[str, option(_WORKLOAD, "ttft=2.5,tpot=0.15, a preset, or a file.", "--slo")],
    profile: Annotated[Path | None, option(_HARDWARE, "What `staffel profile` measured.")] = None,
    hardware: Annotated[
        str | None, option(_HARDWARE, "A sheet instead: a100-80g, h100, h200, b200, l40s ...")
    ] = None,
    model: Annotated[
        str | None, option(_HARDWARE, "With --hardware: a folder with config.json, or opt-66b ...")
    ] = None,
    dtype: Annotated[
        str | None, option(_HARDWARE, "With --hardware: of weights and KV. [default: bfloat16]")
    ] = None,
    mla: Annotated[
        str, option(_HARDWARE, "With --hardware: MLA's KV, compressed or expanded.")
    ] = "compressed",
    nodes: Annotated[int, option(_HARDWARE, "Machines.", min=1)] = 1,
    gpus_per_node: Annotated[
        int | None,
        option(
            _HARDWARE,
            "Devices of each. Default with --profile of a CPU: the cores over its threads; else 8.",
            min=1,
        ),
    ] = None,
    intra_node: Annotated[
        str | None, option(_HARDWARE, "Each device's link in its node. Default: as measured.")
    ] = None,
    inter_node: Annotated[str, option(_HARDWARE, "Each node's link to others.")] = "25Gb/s",
    kv_memory: Annotated[
        str | None,
        option(_HARDWARE, "With --profile: KV cache of each instance. [default: of a CPU 1GiB]"),
    ] = None,
    host_cpu: Annotated[
        str | None,
        option(
            _HARDWARE,
            "CPU ms for each request, step and token, like 7,1,0.07, that server and clients take "
            "from the instances' cores. [default: they have others]",
        ),
    ] = None,
    workload: Annotated[str, option(_WORKLOAD, "As `staffel bench goodput` takes it.")] = "chatbot",
    scale_lengths: Annotated[
        float, option(_WORKLOAD, "Factor for prompt and output lengths.")
    ] = 1.0,
    max_model_len: Annotated[
        int | None, option(_WORKLOAD, "Longer requests are shortened to so many tokens.", min=2)
    ] = None,
    attainment: Annotated[
        float, option(_WORKLOAD, "Share of requests that must meet the SLO.")
    ] = 0.9,
    rate: Annotated[
        float | None,
        option(_WORKLOAD, "Requests/s to serve with few devices. Default: as many as can be."),
    ] = None,
    affinity: Annotated[
        str,
        option(
            _HARDWARE,
            "high: KV may cross nodes; low: it stays within one; auto: whichever is better.",
        ),
    ] = "auto",
    executable: Annotated[
        bool, option(_RESULT, "Only what `staffel serve` can run.", "--executable")
    ] = False,
    placement: Annotated[
        Path, option(_RESULT, "The file for `staffel serve --placement`.", "--placement")
    ] = Path("placement.yaml"),
    output: Annotated[
        Path | None, option(_RESULT, "JSON file with everything.", "--output", "-o")
    ] = None,
    frontier: Annotated[
        Path | None,
        option(_RESULT, "SVG picture: throughput of a device against speed for a user."),
    ] = None,
    seed: Annotated[int, option(_WORKLOAD, "The same seed gives the same plan.")] = 0,
    requests: Annotated[
        int, option(_RESULT, "Simulated for each instance; more is finer and slower.", min=50)
    ] = 200,
) -> None:
    """Find how many instances of which phase to run, and whether to disaggregate."""

    def run() -> None:
        from staffel.plan.inputs import Inputs, prepare

        given = Inputs(
            profile=profile,
            hardware=hardware,
            model=model,
            dtype=dtype,
            mla=mla,
            nodes=nodes,
            devices_per_node=gpus_per_node,
            intra_node=intra_node,
            inter_node=inter_node,
            kv_memory=kv_memory,
            host_cpu=host_cpu,
            workload=workload,
            scale_lengths=scale_lengths,
            max_model_len=max_model_len,
            slo=slo,
            attainment=attainment,
            rate=rate,
            affinity=affinity,
            executable=executable,
            seed=seed,
            requests=requests,
        )
        _plan(prepare(given), placement, output, frontier)

    or_error(run)


def _plan(prepared: Prepared, placement: Path, output: Path | None, picture: Path | None) -> None:
    from staffel.plan.frontier import draw, frontier
    from staffel.plan.pool import Pool
    from staffel.plan.progress import Progress
    from staffel.plan.question import Log
    from staffel.plan.result import conclude
    from staffel.plan.search import search

    question, setting = prepared.question, prepared.setting
    with Pool(prepared.task) as simulator, Progress() as progress:
        found = search(question, simulator, Log(progress.tell))
        progress.tell("sensitivity", 0, 1)
        answer = conclude(question, found, setting, simulator)
        progress.tell("sensitivity", 1, 0)
        if picture is not None:
            progress.tell("frontier", 0, 1)
            points = frontier(question, found, simulator)
            draw(points, question.slo.tpot, setting.device_word, picture)
            progress.tell("frontier", 1, 0)
    placement.write_text(answer.yaml)
    if output is not None:
        answer.save(output)
    _show(answer, placement, setting.device_word)


def _show(answer: Plan, file: Path, device: str) -> None:
    _say(answer.verdict, style="bold")
    rows = {
        "recommended": answer.recommended,
        "runner-up": answer.runner_up,
        "best apart": answer.disaggregated,
        "best colocated": answer.colocated,
    }
    head = ["", "placement", f"{device}s", "requests/s", f"per {device}", "simulated"]
    print_table([head, *(_cells(name, row) for name, row in rows.items() if row is not None)])
    _say("If other things come than planned for:", style="bold")
    print_table(_sensitivity(answer))
    for note in answer.notes:
        _say(f"Note: {note}")
    _say(f"Step times: {answer.basis}. {answer.simulated} candidates were simulated.")
    _say(f"{file}: for `staffel serve --placement {file}`")


def _cells(name: str, row: Row) -> list[str]:
    figures = [f"{row.devices}", f"{row.goodput:.3g}", f"{row.per_device:.3g}"]
    return [name, row.placement, *figures, row.simulated]


def _sensitivity(answer: Plan) -> list[list[str]]:
    seen = answer.sensitivity
    rates = [
        [f"{_percent(factor)} rate", f"{share:.1%} meet the SLO"]
        for factor, share in seen.attainment.items()
    ]
    outputs = [
        [f"{_percent(factor)} output length", f"{goodput:.3g} requests/s"]
        for factor, goodput in seen.goodput.items()
    ]
    return [["", "then"], *rates, *outputs]


def _percent(factor: str) -> str:
    change = round(100 * (float(factor) - 1))
    return f"{change:+d} %" if change else "planned"


def _say(text: str, style: str | None = None) -> None:
    out.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


app = typer.Typer(help="Published evaluations, simulated again.", no_args_is_help=True)


@app.callback()
def _reproduce() -> None:
    """Published evaluations, simulated again."""


@app.command("distserve")
def reproduce_distserve(
    only: Annotated[
        str, typer.Option(help="Rows whose source, model or workload begins so: paper, opt-13b ...")
    ] = "",
    seed: Annotated[int, typer.Option(help="The same seed gives the same figures.")] = 0,
    requests: Annotated[
        int, typer.Option(help="Simulated for each instance; more is finer.", min=50)
    ] = 300,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="JSON file.")] = None,
) -> None:
    """DistServe's Table 1 (OSDI 2024) and its article's examples, with the authors' step times."""

    def run() -> None:
        from staffel.plan.published import ROWS

        rows = [row for row in ROWS if row.matches(only)]
        if not rows:
            known = ", ".join(sorted({name for row in ROWS for name in row.names}))
            raise ConfigError(f"--only: {only!r} is the beginning of none of {known}")
        _reproduce_distserve(rows, seed, requests, output)

    or_error(run)


def _reproduce_distserve(
    rows: list[Published], seed: int, requests: int, output: Path | None
) -> None:
    from staffel.plan import report
    from staffel.plan.progress import Progress
    from staffel.plan.published import TOY_WORKLOAD
    from staffel.plan.question import Log
    from staffel.plan.reproduce import interference, pool, reproduce, toy

    found = []
    with Progress() as progress:
        for workload in sorted({row.workload for row in rows}):
            with pool(workload, seed, requests) as simulator:
                for row in (row for row in rows if row.workload == workload):
                    log = Log(progress.within(row.title))
                    found.append(reproduce(row, simulator.lengths, simulator, log))
        with pool(TOY_WORKLOAD, seed, requests) as simulator:
            example = toy(simulator.lengths, simulator)
    disturbed = interference()
    for each in found:
        _say(report.title(each), style="bold")
        print_table(report.table(each))
        _say(report.difference(each))
    _say("OPT-13B, one A100 for each instance, requests/s and GPU", style="bold")
    print_table(report.toy_table(example))
    _say("A decode step of OPT-13B with a prompt in it", style="bold")
    print_table(report.interference_table(disturbed))
    for reason in report.REASONS:
        _say(f"Note: {reason}")
    if output is not None:
        report.save(output, found, example, disturbed)
