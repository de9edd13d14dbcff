"""`staffel bench`: measures any endpoint that speaks the OpenAI API."""

from __future__ import annotations

import inspect
import math
import shlex
import sys
from collections.abc import Awaitable, Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from staffel.config import ConfigError
from staffel.terminal import option, or_error, out, print_table

if TYPE_CHECKING:  # what measures is loaded when something is measured
    from staffel.bench.results import Result
    from staffel.bench.session import Options, Session

    Work = Callable[[Session], Awaitable[Result]]

app = typer.Typer(help="Measure any endpoint that speaks the OpenAI API.", no_args_is_help=True)

_ENDPOINT, _WORKLOAD, _VERDICT, _RESULT = "Endpoint", "Workload", "Verdict", "Result"


def _endpoint(
    url: Annotated[str, typer.Argument(help="Like http://127.0.0.1:8000, with or without /v1.")],
    api: Annotated[str, option(_ENDPOINT, "completions or chat.")] = "completions",
    api_key: Annotated[
        str | None, option(_ENDPOINT, "Bearer token.", envvar="OPENAI_API_KEY")
    ] = None,
    model: Annotated[
        str | None, option(_ENDPOINT, "Default: the one that /v1/models lists.")
    ] = None,
    tokenizer: Annotated[
        Path | None,
        option(_ENDPOINT, "The model's folder. Default: the server's /tokenize, if it has one."),
    ] = None,
    token_prompts: Annotated[
        bool, option(_ENDPOINT, "Prompts of token ids instead of text.")
    ] = False,
    extra_body: Annotated[str | None, option(_ENDPOINT, "JSON object added to each body.")] = None,
    timeout: Annotated[float, option(_ENDPOINT, "Seconds that a request may take.")] = 600.0,
    seed: Annotated[int, option(_WORKLOAD, "The same seed sends the same requests.")] = 0,
) -> None:
    """Options about what is measured."""


def _asked(
    workload: Annotated[
        str,
        option(
            _WORKLOAD,
            "chatbot, code, summarization, azure-code, azure-conversation, mooncake-conversation, "
            "fixed:IN,OUT, lognormal:IN_MEAN,IN_CV,OUT_MEAN,OUT_CV, or a file.",
        ),
    ] = "chatbot",
    scale_lengths: Annotated[
        float, option(_WORKLOAD, "Factor for prompt and output lengths.")
    ] = 1.0,
    shared_prefix: Annotated[int, option(_WORKLOAD, "Tokens that all prompts begin with.")] = 0,
    ignore_eos: Annotated[
        bool, option(_WORKLOAD, "Ask for outputs of exactly the wanted length.")
    ] = True,
) -> None:
    """Options about what is asked."""


def _judged(
    slo: Annotated[
        str,
        option(_VERDICT, "ttft=0.25,tpot=0.1[,itl_p99=,e2e=,ema=], a preset, or a file.", "--slo"),
    ],
    attainment: Annotated[
        float, option(_VERDICT, "Share of requests that must meet the SLO.")
    ] = 0.9,
    arrivals: Annotated[
        str, option(_WORKLOAD, "poisson, gamma:CV, constant, or trace.")
    ] = "poisson",
    processes: Annotated[
        int | None, option(_ENDPOINT, "That send. Default: as many as it takes.")
    ] = None,
) -> None:
    """Options about when is asked and what is good."""


def _kept(
    devices: Annotated[int, option(_RESULT, "GPUs, or cores, that the endpoint runs on.")] = 1,
    label: Annotated[str | None, option(_RESULT, "Its name in tables and pictures.")] = None,
    output: Annotated[
        Path | None,
        option(_RESULT, "JSON file with everything (.gz: compressed).", "--output", "-o"),
    ] = None,
    report: Annotated[
        Path | None, option(_RESULT, "Folder for an HTML page with pictures.")
    ] = None,
    quiet: Annotated[bool, option(_RESULT, "One line on stdout, nothing else.")] = False,
) -> None:
    """Options about what becomes of the result."""


_LOAD = (_endpoint, _asked, _judged, _kept)


def _measuring(
    *groups: Callable[..., None], **fixed: Any
) -> Callable[[Callable[..., Work]], Callable[..., None]]:
    """Makes a command of a function that returns the work: it takes the groups' options as well.

    `fixed` are those that the command sets itself.
    """

    def make(command: Callable[..., Work]) -> Callable[..., None]:
        own = _parameters(command)
        shared = [parameter for group in groups for parameter in _parameters(group)]

        @wraps(command)
        def run(**given: Any) -> None:
            mine = {parameter.name: given.pop(parameter.name) for parameter in own}
            or_error(lambda: _finish({**given, **fixed}, command(**mine)))

        # Typer reads the command line's form from the signature.
        taken = [*shared, *own]
        run.__signature__ = inspect.Signature(taken)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in taken}
        return run

    return make


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    found = inspect.signature(function, eval_str=True, globals=_names()).parameters.values()
    return [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in found]


def _names() -> dict[str, Any]:
    return {**globals(), "Work": Any}


_Rate = Annotated[float, typer.Option(help="Requests per second.")]
_Duration = Annotated[float | None, typer.Option(help="Seconds to send for.")]
_Requests = Annotated[int | None, typer.Option(min=1, help="Requests to send.")]


@app.command()
@_measuring(*_LOAD)
def run(rate: _Rate, duration: _Duration = None, requests: _Requests = None) -> Work:
    """Measure one rate."""

    async def work(session: Session) -> Result:
        await session.measurement.probe(rate, seconds=duration, requests=requests)
        return session.result("run")

    return work


@app.command()
@_measuring(*_LOAD)
def goodput(
    budget: Annotated[float, typer.Option(min=0.1, help="Minutes for the whole search.")] = 15,
    precision: Annotated[
        float, typer.Option(help="Half the interval's width that is narrow enough, as a share.")
    ] = 0.05,
    first_rate: Annotated[
        float | None, typer.Option(help="Where to begin. Default: by a few unloaded requests.")
    ] = None,
) -> Work:
    """Search the highest rate at which enough requests meet the SLO."""

    async def work(session: Session) -> Result:
        from staffel.bench.unloaded import start_rate, unloaded

        first = first_rate or start_rate(await unloaded(session.subject), 60 * budget)
        found, notes = await session.measurement.search(first, 60 * budget, precision)
        return session.result("goodput", goodput=found, notes=notes)

    return work


@app.command()
@_measuring(*_LOAD)
def sweep(
    rates: Annotated[str, typer.Option(help="FROM:TO:STEP, or numbers with commas.")],
    duration: Annotated[float, typer.Option(help="Seconds to send for, at each rate.")] = 120,
) -> Work:
    """Attainment and percentiles at several rates."""

    async def work(session: Session) -> Result:
        await session.measurement.sweep(_numbers(rates, "--rates"), duration)
        return session.result("sweep")

    return work


@app.command("slo-scale")
@_measuring(*_LOAD)
def slo_scale(
    rate: _Rate,
    scales: Annotated[
        str, typer.Option(help="FROM:TO:STEP, or numbers with commas.")
    ] = "0.25,0.5,0.75,1,1.25,1.5,2",
    duration: _Duration = None,
    requests: _Requests = None,
) -> Work:
    """Attainment of one run under the SLO made tighter and laxer."""

    async def work(session: Session) -> Result:
        from staffel.bench.summary import attainment_at_scales

        wanted, measurement = _numbers(scales, "--scales"), session.measurement
        probe = await measurement.probe(rate, seconds=duration, requests=requests)
        points = attainment_at_scales(probe, measurement.slo, wanted)
        return session.result("slo-scale", scales=points)

    return work


@app.command()
@_measuring(_endpoint, _kept, workload="fixed:32,1")
def interference(
    streams: Annotated[int, typer.Option(min=1, help="Streams that decode steadily.")] = 8,
    lengths: Annotated[str, typer.Option(help="Prompt lengths, in tokens.")] = "128,512,1024",
    repeats: Annotated[int, typer.Option(min=1, help="Prompts of each length.")] = 3,
) -> Work:
    """How much prompts that arrive slow the tokens of running streams."""

    async def work(session: Session) -> Result:
        from staffel.bench.interfere import interference as experiment

        sizes = [int(size) for size in _numbers(lengths, "--lengths")]
        rows, probe = await experiment(
            session.subject, streams=streams, lengths=sizes, repeats=repeats
        )
        return session.result("interference", interference=rows, probes=[probe])

    return work


@app.command("slo")
@_measuring(_endpoint, _asked)
def relative(
    slo: Annotated[
        str, typer.Option("--slo", help="auto: and multiples, like auto:ttft=5x,tpot=1.5x.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The SLO's file.")],
) -> Work:
    """Write an SLO that is a multiple of an unloaded endpoint's own times."""
    if not slo.startswith("auto:"):
        raise ConfigError("--slo: must begin with auto:, like auto:ttft=5x,tpot=1.5x")

    async def work(session: Session) -> Result:
        from staffel.bench.unloaded import relative_slo, unloaded

        session.slo = relative_slo(slo.removeprefix("auto:"), await unloaded(session.subject))
        session.slo.save(output)
        return session.result("slo")

    return work


@app.command()
def compare(
    files: Annotated[list[Path], typer.Argument(help="JSON files of `goodput` or `sweep`.")],
    report: Annotated[
        Path | None, typer.Option(help="Folder for an HTML page with pictures.")
    ] = None,
) -> None:
    """Goodput per device side by side; refuses what was measured differently."""

    def work() -> None:
        from staffel.bench.compare import comparison
        from staffel.bench.report import comparison_table, write_comparison
        from staffel.bench.results import Result

        results = [Result.load(file) for file in files]
        print_table(comparison_table(comparison(results)))
        for result in results:
            if result.interrupted:
                out.print(f"Note: {result.label} was interrupted.", markup=False, highlight=False)
        if report is not None:
            out.print(f"page: {write_comparison(results, report)}", highlight=False)

    or_error(work)


def _finish(given: dict[str, Any], work: Work) -> None:
    """Measure, then print, and write the page if asked for."""
    from staffel.bench.session import Options, measure

    options = Options(**given, command=_command())
    result = measure(options, work)
    _show(result, options)
    if result.spoiled is not None:
        raise ConfigError(f"these figures don't count: {result.spoiled}")
    if result.interrupted:
        sys.exit(130)


def _show(result: Result, options: Options) -> None:
    from staffel.bench.report import result_tables, write_report
    from staffel.bench.summary import quiet_line

    page = write_report(result, options.report) if options.report is not None else None
    if options.quiet:
        print(quiet_line(result))
        return
    for title, table in result_tables(result):
        out.print(title, style="bold", highlight=False)
        if table:
            print_table(table)
    for note in result.notes:
        out.print(f"Note: {note}", markup=False, highlight=False, soft_wrap=True)
    if result.interrupted:
        out.print("Note: interrupted; this is what there was.", highlight=False)
    if page is not None:
        out.print(f"page: {page}", highlight=False)


def _command() -> str:
    """As it was typed, but for the key."""
    words = sys.argv[1:]
    shown = [
        "***" if before == "--api-key" else word
        for before, word in zip(["", *words], words, strict=False)
    ]
    return "staffel " + shlex.join(shown)


def _numbers(text: str, option: str) -> list[float]:
    """From "0.5:4:0.5" (ends included) or "0.5,1,2"."""
    try:
        if ":" in text:
            start, end, step = (float(part) for part in text.split(":"))
            count = int((end - start) / step + 1e-9) + 1
            numbers = [start + i * step for i in range(count if end >= start else 0)]
        else:
            numbers = [float(part) for part in text.split(",")]
    except (ValueError, ZeroDivisionError):
        numbers = []
    if not numbers or not all(0 < number < math.inf for number in numbers):
        raise ConfigError(f"{option}: {text!r} is not FROM:TO:STEP or numbers above 0")
    return numbers
