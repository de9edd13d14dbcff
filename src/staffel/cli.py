"""The command line: one command per question. Parses, calls one function, prints."""

from __future__ import annotations

import signal
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

import staffel
from staffel.bench.commands import app as bench_app
from staffel.config import ConfigError, ModelSpec, Placement, Role, parse_bytes
from staffel.latency.commands import kv_cost
from staffel.model.commands import profile
from staffel.plan.commands import app as reproduce_app
from staffel.plan.commands import plan
from staffel.sim.commands import simulate
from staffel.terminal import or_error, out, print_table

app = typer.Typer(
    help=staffel.__doc__,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class PolicyName(StrEnum):
    chunked = "chunked"
    prefill_first = "prefill-first"


class DtypeName(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class QuantizationName(StrEnum):
    int8 = "int8"


class DeviceName(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class LogLevel(StrEnum):
    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


_PLACEMENT = "Placement"
_SERVER = "Server"
_LIMITS = "Limits on clients"


@app.command()
def serve(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A Hugging Face folder or hub id; without it the default model, "
            "SmolLM2-135M-Instruct."
        ),
    ] = None,
    prefill: Annotated[
        int | None,
        typer.Option(min=0, help="Prefill instances. [default: 1]", rich_help_panel=_PLACEMENT),
    ] = None,
    decode: Annotated[
        int | None,
        typer.Option(min=0, help="Decode instances. [default: 1]", rich_help_panel=_PLACEMENT),
    ] = None,
    colocated: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Instances that do both phases; then no prefill or decode ones unless given.",
            rich_help_panel=_PLACEMENT,
        ),
    ] = None,
    placement: Annotated[
        Path | None,
        typer.Option(help="YAML file with all of this panel.", rich_help_panel=_PLACEMENT),
    ] = None,
    policy: Annotated[
        PolicyName | None,
        typer.Option(
            help="Batch policy of colocated instances. [default: chunked]",
            rich_help_panel=_PLACEMENT,
        ),
    ] = None,
    chunk_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Most tokens of a step; longer prompts go in chunks. [default: 256]",
            rich_help_panel=_PLACEMENT,
        ),
    ] = None,
    kv_memory: Annotated[
        str | None,
        typer.Option(
            help="KV cache of each instance, in bytes. [default: 1GiB; on a GPU what is left]",
            rich_help_panel=_PLACEMENT,
        ),
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None,
        typer.Option(
            help="Share of a GPU's memory for all instances on it. [default: 0.9]",
            rich_help_panel=_PLACEMENT,
        ),
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of a KV block. [default: 16]", rich_help_panel=_PLACEMENT),
    ] = None,
    prefix_cache: Annotated[
        bool | None,
        typer.Option(
            "--prefix-cache/--no-prefix-cache",
            help="Compute what prompts begin with in common once. [default: prefix-cache]",
            rich_help_panel=_PLACEMENT,
        ),
    ] = None,
    max_sequences: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Most sequences in an instance at a time. [default: 128]",
            rich_help_panel=_PLACEMENT,
        ),
    ] = None,
    dtype: Annotated[
        DtypeName | None,
        typer.Option(
            help="auto: float32 on a CPU. [default: auto]",
            rich_help_panel=_PLACEMENT,
        ),
    ] = None,
    quantization: Annotated[
        QuantizationName | None,
        typer.Option(
            help="Weights in 8 bits, on a CPU: faster, a quarter of the memory, not quite the "
            "same text. [default: as they are]",
            rich_help_panel=_PLACEMENT,
        ),
    ] = None,
    device: Annotated[
        DeviceName | None,
        typer.Option(help="[default: auto]", rich_help_panel=_PLACEMENT),
    ] = None,
    cuda_graphs: Annotated[
        bool | None,
        typer.Option(
            "--cuda-graphs/--no-cuda-graphs",
            help="Capture a GPU's decode steps. [default: cuda-graphs]",
            rich_help_panel=_PLACEMENT,
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="CPU threads of each instance. [default: the cores shared out evenly]",
            rich_help_panel=_PLACEMENT,
        ),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(help="Most tokens of prompt and output. [default: the model's limit]"),
    ] = None,
    local_prefill_below: Annotated[
        int,
        typer.Option(
            min=0,
            help="Prompts with fewer uncached tokens are prefilled where they decode; 0: none.",
        ),
    ] = 0,
    host: Annotated[str, typer.Option(rich_help_panel=_SERVER)] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, rich_help_panel=_SERVER)] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="STAFFEL_API_KEY",
            help="What clients must send as bearer token. All users of this machine can see it "
            "in the list of processes: rather give --api-key-file or the variable.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="A file that holds the API key.", rich_help_panel=_SERVER),
    ] = None,
    served_model_name: Annotated[
        str | None,
        typer.Option(help="The model's name in the API.", rich_help_panel=_SERVER),
    ] = None,
    max_queue: Annotated[
        int,
        typer.Option(
            min=0,
            help="Most requests waiting to be sent to an instance; more get a 429.",
            rich_help_panel=_SERVER,
        ),
    ] = 1024,
    request_timeout: Annotated[
        float,
        typer.Option(
            min=0, help="Seconds from arrival to the end; 0: none.", rich_help_panel=_SERVER
        ),
    ] = 0,
    drain_timeout: Annotated[
        float,
        typer.Option(
            min=0,
            help="On SIGTERM, seconds that running requests may take to finish.",
            rich_help_panel=_SERVER,
        ),
    ] = 30,
    hang_timeout: Annotated[
        float,
        typer.Option(
            min=0,
            help="An instance without progress for so many seconds is killed and replaced; 0: "
            "never. Above the longest step.",
            rich_help_panel=_SERVER,
        ),
    ] = 120,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Makes the draws of requests without a seed repeatable.", rich_help_panel=_SERVER
        ),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(
            help="Journal of every decision, prompts included, for `staffel replay`.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    max_connections: Annotated[
        int,
        typer.Option(
            min=1,
            help="Connections at a time; the system's limit on open files may allow less.",
            rich_help_panel=_LIMITS,
        ),
    ] = 4096,
    max_head: Annotated[
        str,
        typer.Option(help="First line and headers of a request.", rich_help_panel=_LIMITS),
    ] = "64KiB",
    head_timeout: Annotated[
        float,
        typer.Option(help="Seconds that they may take.", rich_help_panel=_LIMITS),
    ] = 10,
    max_body: Annotated[
        str,
        typer.Option(help="Body of a request.", rich_help_panel=_LIMITS),
    ] = "8MiB",
    body_timeout: Annotated[
        float,
        typer.Option(help="Seconds that it may take.", rich_help_panel=_LIMITS),
    ] = 60,
    max_choices: Annotated[
        int,
        typer.Option(min=1, help="Prompts times n of a request.", rich_help_panel=_LIMITS),
    ] = 1024,
    max_schema: Annotated[
        str,
        typer.Option(help="A JSON schema in response_format.", rich_help_panel=_LIMITS),
    ] = "256KiB",
    grammar_timeout: Annotated[
        float,
        typer.Option(help="Seconds that a schema may take to compile.", rich_help_panel=_LIMITS),
    ] = 5,
    log_level: Annotated[LogLevel, typer.Option(rich_help_panel=_SERVER)] = LogLevel.info,
) -> None:
    """Serve a model, prefill and decode apart, over the OpenAI API."""
    instance_options = {
        "policy": policy and policy.value,
        "chunk_tokens": chunk_tokens,
        "kv_memory": kv_memory,
        "gpu_memory_utilization": gpu_memory_utilization,
        "block_size": block_size,
        "prefix_cache": prefix_cache,
        "max_sequences": max_sequences,
        "dtype": dtype and dtype.value,
        "quantization": quantization and quantization.value,
        "device": device and device.value,
        "cuda_graphs": cuda_graphs,
        "threads": threads,
    }
    given = {name: value for name, value in instance_options.items() if value is not None}
    counts: dict[Role, int | None] = {
        "prefill": prefill,
        "decode": decode,
        "colocated": colocated,
    }

    def run() -> None:
        from staffel.api.limits import Limits
        from staffel.api.server import ServeOptions
        from staffel.api.server import serve as serve_model
        from staffel.runtime.deployment import check_servable
        from staffel.runtime.logs import set_up_logging

        limits = Limits(
            max_connections=max_connections,
            max_head_bytes=parse_bytes(max_head, "--max-head"),
            head_timeout=head_timeout,
            max_body_bytes=parse_bytes(max_body, "--max-body"),
            body_timeout=body_timeout,
            max_choices=max_choices,
            max_schema_bytes=parse_bytes(max_schema, "--max-schema"),
            grammar_timeout=grammar_timeout,
        )
        set_up_logging(log_level.value)
        chosen = _placement(placement, counts, given)
        check_servable(chosen)  # before a model is fetched for it
        spec = _model_spec(model, chosen, max_model_len)
        options = ServeOptions(
            placement=chosen,
            host=host,
            port=port,
            api_key=_api_key(api_key, api_key_file),
            served_model_name=served_model_name,
            record=record,
            max_queue=max_queue,
            local_prefill_below=local_prefill_below,
            request_timeout=request_timeout,
            drain_timeout=drain_timeout,
            hang_timeout=hang_timeout,
            seed=seed,
            limits=limits,
            log_level=log_level.value,
        )
        serve_model(spec, options, _announce)

    or_error(run)


@app.command()
def models() -> None:
    """List the models that start without a download."""
    from staffel.model.hub import cached_models

    found = cached_models()
    if not found:
        out.print("No model is cached. `staffel serve` fetches the default one.")
        return
    rows = [[entry.name, f"{entry.bytes / 1e9:.2f} GB", str(entry.path)] for entry in found]
    print_table([["model", "size", "folder"], *rows])


@app.command()
def replay(
    journal: Annotated[Path, typer.Argument(help="A file from `staffel serve --record`.")],
) -> None:
    """Run a journal through fresh cores and compare every command."""

    def run() -> None:
        from staffel.control import journal as journals

        try:
            with journal.open("rb") as lines:
                result = journals.replay(lines)
        except OSError as error:
            raise ConfigError(f"JOURNAL: {journal}: {error.strerror}") from None
        if not result.calls and result.fault is not None:
            raise ConfigError(f"JOURNAL: {journal}: {result.fault}")
        if not result.calls:
            raise ConfigError(f"JOURNAL: {journal} is empty; give a file from `serve --record`")
        if result.mismatch is not None:
            _fail_replay(result.mismatch)
        out.print(f"{result.cores} cores, {result.calls} calls: every command is the same")
        if result.cut_off:
            out.print("The last line is cut off, as a server that was killed leaves it.")
        if result.fault is not None:
            out.print(f"The replay ends there: {result.fault}", markup=False)
            raise typer.Exit(1)

    or_error(run)


def _fail_replay(mismatch: Any) -> NoReturn:
    out.print(
        f"line {mismatch.line}: {mismatch.core}.{mismatch.call} returned something else\n"
        f"  recorded: {mismatch.recorded.decode()}\n  replayed: {mismatch.replayed.decode()}",
        markup=False,
    )
    raise typer.Exit(1)


@app.callback(invoke_without_command=True)
def _begin(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    # From here on Ctrl-C is an exception again, which commands may clean up after.
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if version:
        out.print(f"staffel {staffel.__version__}")
        raise typer.Exit


def _placement(
    file: Path | None, counts: dict[Role, int | None], options: dict[str, Any]
) -> Placement:
    """The placement that the options name; 1P1D without any."""
    if file is not None:
        given = [name for name, count in counts.items() if count is not None] + list(options)
        if given:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise ConfigError(f"--placement: can't be combined with {names}; put it in the file")
        return Placement.load(file)
    if "kv_memory" in options:
        parse_bytes(options["kv_memory"], "--kv-memory")
    return Placement.of_counts(counts, options)


def _api_key(given: str | None, file: Path | None) -> str | None:
    """The key itself, from whichever of the two options has it."""
    if file is None:
        return given
    if given is not None:
        raise ConfigError("--api-key-file: --api-key or $STAFFEL_API_KEY gives a key already")
    try:
        key = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--api-key-file: {file} can't be read: {reason}") from None
    if not key:
        raise ConfigError(f"--api-key-file: {file} is empty; write the key into it")
    return key


def _model_spec(model: str | None, placement: Placement, max_model_len: int | None) -> ModelSpec:
    from staffel.model.hub import load_spec

    if model is not None and placement.model is not None:
        raise ConfigError("MODEL: is given by the --placement file already; leave one of them out")
    return load_spec(model or placement.model, max_model_len, _announce)


def _announce(text: str) -> None:
    print(text, flush=True)


app.command()(profile)
app.command()(plan)
app.command()(simulate)
app.command("kv-cost")(kv_cost)
app.add_typer(bench_app, name="bench")
app.add_typer(reproduce_app, name="reproduce")
