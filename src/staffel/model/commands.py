"""`staffel profile`: how fast each phase of a model is on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from staffel.config import (
    ConfigError,
    Device,
    Dtype,
    InstanceSpec,
    Quantization,
    check_choice,
    parse_bytes,
)
from staffel.terminal import or_error, out, print_table

if TYPE_CHECKING:  # what measures is loaded when something is measured
    from staffel.latency.profile import Profile, Slowdown
    from staffel.model.profile import Wanted


def profile(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A Hugging Face folder or hub id; without it the default model, "
            "SmolLM2-135M-Instruct."
        ),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The profile's file.")] = Path(
        "profile.json"
    ),
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="CPU threads of an instance. [default: half of the cores: two instances]",
        ),
    ] = None,
    tp: Annotated[str, typer.Option(help="Tensor-parallel degrees, with commas; only 1.")] = "1",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    quantization: Annotated[
        str | None, typer.Option(help="int8: weights in 8 bits. [default: as they are]")
    ] = None,
    kv_memory: Annotated[
        str | None,
        typer.Option(
            help="KV cache of each of the two instances that are started. "
            "[default: 1GiB; on a GPU what is left]"
        ),
    ] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a KV block.")] = 16,
    max_model_len: Annotated[
        int | None,
        typer.Option(help="Most tokens of prompt and output. [default: the model's limit]"),
    ] = None,
    budget: Annotated[
        float, typer.Option(min=0.01, help="Minutes that measuring may take, after loading.")
    ] = 4,
) -> None:
    """Measure how fast each phase of a model is on this machine."""

    def run() -> None:
        _check(tp, device, dtype, quantization)
        _check_folder(output)
        if kv_memory is not None:
            parse_bytes(kv_memory, "--kv-memory")  # which the spec would call by another name
        spec = InstanceSpec(
            role="colocated",
            kv_memory=kv_memory,
            block_size=block_size,
            device=device,  # type: ignore[arg-type]
            dtype=dtype,  # type: ignore[arg-type]
            quantization=quantization,  # type: ignore[arg-type]
        )
        from staffel.model.hub import load_spec
        from staffel.model.profile import Wanted

        wanted = Wanted(
            model=load_spec(model, max_model_len, lambda text: out.print(text, highlight=False)),
            spec=spec,
            threads=threads or max(1, len(os.sched_getaffinity(0)) // 2),
            budget=60 * budget,
        )
        found = _measure(wanted)
        found.save(output)
        _show(found, output)
        if found.interrupted:
            sys.exit(130)

    or_error(run)


def _check(tp: str, device: str, dtype: str, quantization: str | None) -> None:
    if tp.strip() != "1":
        raise ConfigError(f"--tp: {tp} can't be measured: no instance spans several devices yet")
    check_choice("--device", device, get_args(Device))
    check_choice("--dtype", dtype, get_args(Dtype))
    if quantization is not None:
        check_choice("--quantization", quantization, get_args(Quantization))


def _check_folder(output: Path) -> None:
    """Before minutes of measuring."""
    if not output.parent.is_dir() or output.is_dir():
        raise ConfigError(f"--output: {output} can't be written; give a file in a folder there is")


def _measure(wanted: Wanted) -> Profile:
    """With a bar that says how long it will still take."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from staffel.model.profile import profile as measure

    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=out, transient=True, disable=not out.is_terminal) as bar:
        task = bar.add_task(f"loading {wanted.model.name} twice", total=None)

        def watch(done: float, total: float) -> None:
            bar.update(task, description="measuring", completed=done, total=total)

        return measure(wanted, watch)


def _show(profile: Profile, output: Path) -> None:
    for title, table in tables(profile):
        out.print(title, style="bold", highlight=False)
        print_table(table)
    for note in _notes(profile):
        out.print(note, soft_wrap=True)
    out.print(f"profile: {output}", highlight=False)


def _notes(profile: Profile) -> Iterator[str]:
    if profile.interrupted:
        yield "Interrupted: fitted to what had been measured; the file says so."
    if not profile.slowdown:
        why = "too few cores are left for a neighbour"
        if profile.device != "cpu":
            why = "instances are taken to have a GPU each"
        elif profile.interrupted:
            why = "not yet"
        yield f"Note: what a busy neighbour costs wasn't measured: {why}."


def tables(profile: Profile) -> list[tuple[str, list[list[str]]]]:
    """Titles and tables, each with its head: the fit's errors, typical steps, slowdown, copies."""
    from staffel.latency.model import Work

    errors = [
        [f"{e.phase} {e.region}", str(e.points), f"{e.median:.1%}", f"{e.p90:.1%}"]
        for e in profile.errors[1]
    ]
    typical = {
        "prefill of 32 tokens": Work.prefill(32),
        "prefill of 256 tokens": Work.prefill(256),
        "decode of 1 sequence after 256 tokens": Work.decode(1, 256),
        "decode of 8": Work.decode(8, 256),
        "decode of 32": Work.decode(32, 256),
    }
    model = profile.models[1]
    steps = [[name, f"{1e3 * model.step_seconds(work):.1f}"] for name, work in typical.items()]
    steps.append(["KV copy of 256 tokens", f"{1e3 * _copy_seconds(profile, 256):.1f}"])
    weights = f", weights {profile.quantization}" if profile.quantization else ""
    head = f"{profile.model}, {profile.dtype}{weights}, {profile.threads} CPU threads"
    found = [
        ("Error of the fit on batches that it did not see", [
            ["phase and batch size", "batches", "median", "P90"], *errors
        ]),
        (f"Fitted: {head}", [["step", "ms"], *steps]),
    ]  # fmt: skip
    if profile.slowdown:
        found.append(("Longer beside a busy neighbour", _slowdown_table(profile)))
    return found


def _copy_seconds(profile: Profile, tokens: int) -> float:
    return profile.transfer.seconds(tokens * profile.kv_bytes_per_token)


def _slowdown_table(profile: Profile) -> list[list[str]]:
    neighbours = sorted({name for factors in profile.slowdown.values() for name in factors})
    rows = [
        [phase, *(_slowdown_text(factors.get(name)) for name in neighbours)]
        for phase, factors in profile.slowdown.items()
    ]
    return [["step", *(f"neighbour: {name}" for name in neighbours)], *rows]


def _slowdown_text(slowdown: Slowdown | None) -> str:
    if slowdown is None:
        return "-"
    return f"{1e3 * slowdown.fixed_s:.1f} ms + {slowdown.share:.1%}"
