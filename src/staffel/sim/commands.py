"""`staffel simulate`: what a placement would do, before it is served."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

from staffel.config import ConfigError, Policy, check_choice
from staffel.terminal import option, or_error, out, print_table

if TYPE_CHECKING:  # what simulates is loaded when something is simulated
    from staffel.sim.goodput import SimulatedGoodput
    from staffel.sim.session import Simulated

_COST, _PLACEMENT, _WORKLOAD, _VERDICT, _RESULT = (
    "Hardware and model", "Placement", "Workload", "Verdict", "Result",
)  # fmt: skip


def simulate(
    slo: Annotated[
        str,
        option(_VERDICT, "ttft=0.25,tpot=0.1[,itl_p99=,e2e=,ema=], a preset, or a file.", "--slo"),
    ],
    rate: Annotated[float | None, option(_WORKLOAD, "Requests per second.")] = None,
    goodput: Annotated[
        bool,
        option(_VERDICT, "Search the highest rate that is good, instead of --rate.", "--goodput"),
    ] = False,
    profile: Annotated[Path | None, option(_COST, "What `staffel profile` measured.")] = None,
    hardware: Annotated[
        str | None, option(_COST, "A sheet instead: a100-80g, h100, h200, b200, l40s ...")
    ] = None,
    model: Annotated[
        str | None, option(_COST, "With --hardware: a folder with config.json, or opt-66b ...")
    ] = None,
    dtype: Annotated[
        str | None, option(_COST, "With --hardware: of weights and KV. [default: bfloat16]")
    ] = None,
    mla: Annotated[
        str | None,
        option(_COST, "With --hardware: MLA's KV, compressed or expanded. [default: compressed]"),
    ] = None,
    link: Annotated[
        str | None, option(_COST, "KV's way, like 25Gb/s. [default: the profile's or the sheet's]")
    ] = None,
    host_cpu: Annotated[
        str | None,
        option(
            _COST,
            "CPU ms for each request, step and token, like 7,1,0.07, that server and clients take "
            "from the instances' cores. [default: they have others]",
        ),
    ] = None,
    placement: Annotated[Path | None, option(_PLACEMENT, "As `staffel serve` takes it.")] = None,
    prefill: Annotated[
        int | None, option(_PLACEMENT, "Prefill instances. [default: 1]", min=0)
    ] = None,
    decode: Annotated[
        int | None, option(_PLACEMENT, "Decode instances. [default: 1]", min=0)
    ] = None,
    colocated: Annotated[
        int | None, option(_PLACEMENT, "Instances that do both phases.", min=0)
    ] = None,
    policy: Annotated[
        str | None, option(_PLACEMENT, "Of colocated ones: chunked or prefill-first.")
    ] = None,
    chunk_tokens: Annotated[
        int | None, option(_PLACEMENT, "Most tokens of a step. [default: 256]", min=1)
    ] = None,
    kv_memory: Annotated[
        str | None,
        option(
            _PLACEMENT,
            "KV cache of each instance. [default: of a CPU 1GiB, of a sheet what fits]",
        ),
    ] = None,
    max_sequences: Annotated[
        int | None,
        option(_PLACEMENT, "Most sequences in an instance at a time. [default: 128]", min=1),
    ] = None,
    tp: Annotated[int, option(_PLACEMENT, "Devices that share each layer.", min=1)] = 1,
    pp: Annotated[int, option(_PLACEMENT, "Pipeline stages.", min=1)] = 1,
    workload: Annotated[
        str, option(_WORKLOAD, "As `staffel bench goodput` takes it.")
    ] = "chatbot",
    scale_lengths: Annotated[
        float, option(_WORKLOAD, "Factor for prompt and output lengths.")
    ] = 1.0,
    shared_prefix: Annotated[
        int, option(_WORKLOAD, "Tokens that all prompts begin with.", min=0)
    ] = 0,
    max_model_len: Annotated[
        int | None, option(_WORKLOAD, "Longer requests are shortened to so many tokens.", min=2)
    ] = None,
    arrivals: Annotated[
        str, option(_WORKLOAD, "poisson, gamma:CV, constant, or trace.")
    ] = "poisson",
    requests: Annotated[int, option(_WORKLOAD, "How many.", min=1)] = 1000,
    seed: Annotated[int, option(_WORKLOAD, "The same seed gives the same requests.")] = 0,
    attainment: Annotated[
        float, option(_VERDICT, "Share of requests that must meet the SLO.")
    ] = 0.9,
    output: Annotated[
        Path | None,
        option(_RESULT, "JSON file with everything (.gz: compressed), also for bench compare.",
                "--output", "-o"),
    ] = None,
    report: Annotated[
        Path | None, option(_RESULT, "Folder for an HTML page and a picture of the inside.")
    ] = None,
) -> None:  # fmt: skip
    """Simulate a placement: the server's own decisions, in virtual time."""
    given = {
        "policy": policy,
        "chunk_tokens": chunk_tokens,
        "kv_memory": kv_memory,
        "max_sequences": max_sequences,
    }

    def work() -> None:
        from staffel.sim.session import Options, run

        if (rate is None) == (not goodput):
            raise ConfigError("give either --rate R or --goodput")
        if policy is not None:
            check_choice("--policy", policy, get_args(Policy))
        options = Options(
            command=shlex.join(["staffel", *sys.argv[1:]]),
            profile=profile, hardware=hardware, model=model, dtype=dtype, mla=mla, link=link,
            host_cpu=host_cpu, placement=placement, prefill=prefill, decode=decode,
            colocated=colocated,
            instance={name: value for name, value in given.items() if value is not None},
            tp=tp, pp=pp, workload=workload, scale_lengths=scale_lengths,
            shared_prefix=shared_prefix, max_model_len=max_model_len, arrivals=arrivals,
            rate=rate, slo=slo, attainment=attainment, requests=requests, seed=seed,
        )  # fmt: skip
        _finish(run(options), output, report)

    or_error(work)


def _finish(simulated: Simulated, output: Path | None, report: Path | None) -> None:
    _show(simulated)
    if output is not None:
        _writing(output, lambda: simulated.save(output))
    if report is not None:
        _writing(report, lambda: _write_report(simulated, report))


def _writing(path: Path, write: Any) -> None:
    try:
        write()
    except OSError as error:
        raise ConfigError(f"{path}: can't be written: {error.strerror}") from None
    out.print(f"wrote {path}", markup=False)


def _write_report(simulated: Simulated, folder: Path) -> None:
    from staffel.bench.report import write_report
    from staffel.sim.pictures import occupancy

    write_report(simulated.result, folder)
    (folder / "inside.svg").write_text(occupancy(simulated.outcome))


def _show(simulated: Simulated) -> None:
    from staffel.bench.report import result_tables

    out.print(simulated.setting.basis, style="dim", markup=False)
    for title, table in result_tables(simulated.result):
        out.print(f"\n{title}", markup=False)
        if table:
            print_table(table)
    if simulated.goodput is not None:
        out.print("\nRates that were tried")
        print_table(_tried(simulated.goodput))
    out.print("\nInstances")
    print_table(_instances(simulated))
    _show_handoffs(simulated)


def _tried(found: SimulatedGoodput) -> list[list[str]]:
    rows = [
        [f"{probe.rate:.3g}", f"{probe.attainment:.1%}", "yes" if probe.good else "no"]
        for probe in sorted(found.probes, key=lambda probe: probe.rate)
    ]
    return [["requests/s", "met the SLO", "good"], *rows]


def _instances(simulated: Simulated) -> list[list[str]]:
    outcome = simulated.outcome
    rows = []
    for use in outcome.instances:
        used = [sample.used for sample in use.samples] or [0.0]
        rows.append([
            use.name, f"{outcome.utilisation(use):.0%}",
            f"{use.prompt_tokens / max(use.steps, 1):.1f}",
            f"{use.decode_tokens / max(use.steps, 1):.1f}",
            f"{sum(used) / len(used):.0%}", f"{max(used):.0%}", str(use.preemptions),
        ])  # fmt: skip
    head = ["", "busy", "prompt tokens a step", "decoding", "KV in use", "at most", "preemptions"]
    return [head, *rows]


def _show_handoffs(simulated: Simulated) -> None:
    from staffel.sim.session import quantile

    handoffs, reads = (sorted(times) for times in (simulated.outcome.handoffs(),
                                                   simulated.outcome.reads()))  # fmt: skip
    if handoffs:
        out.print(
            f"\nHandoff: median {_ms(quantile(handoffs, 50))}, P90 {_ms(quantile(handoffs, 90))}; "
            f"of it reading {_ms(quantile(reads, 50))} and {_ms(quantile(reads, 90))}",
            markup=False,
        )


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.3g} ms"
