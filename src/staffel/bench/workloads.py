"""Workloads by name, by formula, or from a file, with the options that change them.

Sizes are drawn by inverting distribution functions at uniform numbers of `random.Random`, whose
sequence for a seed is the same in all Python versions: a seed means the same requests everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from pathlib import Path
from random import Random
from statistics import NormalDist

from msgspec.structs import replace

from staffel.bench.encoders import Encode, approximate_tokens
from staffel.bench.sessions import conversations
from staffel.bench.tables import TABLES, Table, load
from staffel.bench.workload import Lengths, Style, Workload
from staffel.bench.workload_files import Trace, read_trace
from staffel.config import ConfigError

FORMS = "fixed:IN,OUT, lognormal:IN_MEAN,IN_CV,OUT_MEAN,OUT_CV, or a file's path"


@dataclass(frozen=True)
class _Source:
    """Where lengths come from, before options change them. Satisfies `Workload`."""

    name: str
    draw: Callable[[int], Iterator[Lengths]]
    """From a seed."""
    longest: float = math.inf
    """No request has more tokens, prompt and output together."""
    style: Style = "prose"
    times: list[float] | None = None
    notes: tuple[str, ...] = ()

    def lengths(self, seed: int) -> Iterator[Lengths]:
        return self.draw(seed)

    def arrivals(self) -> list[float] | None:
        return self.times


def parse_workload(
    text: str,
    *,
    scale_lengths: float = 1.0,
    shared_prefix: int = 0,
    max_model_len: int | None = None,
    encode: Encode | None = None,
) -> Workload:
    """The workload that `text` names: one of TABLES, or one of FORMS. docs/workloads.md has them.

    Args:
        scale_lengths: Factor for prompt and output lengths (and prefix blocks); what is left is
            at least 1 token.
        shared_prefix: Tokens put in front of every prompt, the same for all. Not scaled.
        max_model_len: Longer requests are shortened to so many tokens, prompt and output in
            proportion, and flagged `shortened`.
        encode: Counts the tokens of files that hold text; None: an approximation, noted.

    Raises:
        ConfigError: names the option, or the file with its line and field.
    """
    source = _source(text.strip(), encode)
    _check(scale_lengths, shared_prefix, max_model_len)
    if scale_lengths != 1:
        change = partial(_scaled, factor=scale_lengths)
        # Each of both lengths is rounded, up to 1 at least.
        longest = source.longest * scale_lengths + 2
        source = _changed(source, f"scale={scale_lengths:g}", change, longest)
    if shared_prefix:
        change = partial(_prefixed, tokens=shared_prefix)
        longest = source.longest + shared_prefix
        source = _changed(source, f"shared={shared_prefix}", change, longest)
    if max_model_len is not None and max_model_len < source.longest:
        change = partial(_fitted, limit=max_model_len)
        source = _changed(source, f"max={max_model_len}", change, max_model_len)
    return source


def _check(scale: float, shared: int, limit: int | None) -> None:
    if not (math.isfinite(scale) and scale > 0):
        raise ConfigError("--scale-lengths: must be a number above 0")
    if shared < 0:
        raise ConfigError("--shared-prefix: must be 0 or more tokens")
    if limit is not None and limit < shared + 2:
        raise ConfigError(
            f"--shared-prefix: {shared} tokens leave no room in a context of {limit}; "
            f"give at most {max(0, limit - 2)}"
        )


def _changed(
    source: _Source, label: str, change: Callable[[Lengths], Lengths], longest: float
) -> _Source:
    return _Source(
        name=f"{source.name} {label}",
        draw=lambda seed: map(change, source.draw(seed)),
        longest=longest,
        style=source.style,
        times=source.times,
        notes=source.notes,
    )


# --- what the options change ---


def _scaled(lengths: Lengths, *, factor: float) -> Lengths:
    prompt = max(1, round(lengths.prompt_tokens * factor))
    block = max(1, round(lengths.block * factor))
    output = max(1, round(lengths.output_tokens * factor))
    return _cut(replace(lengths, block=block, output_tokens=output), prompt)


def _prefixed(lengths: Lengths, *, tokens: int) -> Lengths:
    return replace(lengths, shared=tokens, prompt_tokens=lengths.prompt_tokens + tokens)


def _fitted(lengths: Lengths, *, limit: int) -> Lengths:
    total = lengths.prompt_tokens + lengths.output_tokens
    if total <= limit:
        return lengths
    prompt = max(lengths.prompt_tokens * limit // total, lengths.shared + 1)
    prompt = min(prompt, limit - 1)
    return replace(_cut(lengths, prompt), output_tokens=limit - prompt, shortened=True)


def _cut(lengths: Lengths, prompt: int) -> Lengths:
    """With so many prompt tokens, and no block that begins beyond them."""
    blocks = -(-(prompt - lengths.shared) // lengths.block)
    return replace(lengths, prompt_tokens=prompt, prefix=lengths.prefix[:blocks])


# --- where lengths come from ---


def _source(text: str, encode: Encode | None) -> _Source:
    kind, colon, rest = text.partition(":")
    if text in TABLES:
        return _from_table(load(text))
    if colon and kind == "fixed":
        return _fixed(text, rest)
    if colon and kind == "lognormal":
        return _lognormal(text, rest)
    path = Path(rest if colon and kind == "file" else text).expanduser()
    if path.is_file():
        return _from_trace(read_trace(path), encode)
    if colon and kind == "file":
        raise ConfigError(f"--workload: no file {path}")
    raise ConfigError(
        f"--workload: {text!r} is no workload and no file; give one of {', '.join(TABLES)}, {FORMS}"
    )


def _from_table(table: Table) -> _Source:
    def draw(seed: int) -> Iterator[Lengths]:
        return (Lengths(prompt, output) for _, prompt, output in table.draws(seed))

    longest = table.prompt.values[-1] + max(row[-1] for row in table.output.rows)
    return _Source(
        name=table.name,
        draw=draw if table.sessions is None else partial(conversations, table),
        longest=longest if table.below is None else table.below - 1,
        style=table.style,
    )


def _fixed(name: str, text: str) -> _Source:
    prompt, output = _numbers(name, text, "IN,OUT")
    if not (prompt.is_integer() and output.is_integer() and prompt >= 1 and output >= 1):
        raise ConfigError(f"--workload: {name}: both must be whole tokens, at least 1")
    lengths = Lengths(int(prompt), int(output))

    def draw(_: int) -> Iterator[Lengths]:
        while True:
            yield lengths

    return _Source(name, draw, longest=prompt + output)


def _lognormal(name: str, text: str) -> _Source:
    """Independent; of mean m and coefficient of variation c: sigma² = ln(1 + c²),
    mu = ln m - sigma² / 2. Rounded, at least 1 token.
    """
    prompt_mean, prompt_cv, output_mean, output_cv = _numbers(
        name, text, "IN_MEAN,IN_CV,OUT_MEAN,OUT_CV"
    )
    if min(prompt_mean, output_mean) < 1 or min(prompt_cv, output_cv) < 0:
        raise ConfigError(f"--workload: {name}: means must be at least 1, CVs at least 0")

    def draw(seed: int) -> Iterator[Lengths]:
        rng = Random(f"lognormal/{seed}")
        while True:
            prompt = _lognormal_tokens(prompt_mean, prompt_cv, rng)
            yield Lengths(prompt, _lognormal_tokens(output_mean, output_cv, rng))

    return _Source(name, draw)


def _lognormal_tokens(mean: float, cv: float, rng: Random) -> int:
    variance = math.log(1 + cv * cv)
    level = max(rng.random(), 2.0**-53)
    deviation = NormalDist().inv_cdf(level) * math.sqrt(variance)
    return max(1, round(mean * math.exp(deviation - variance / 2)))


def _numbers(name: str, text: str, form: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != len(form.split(",")) or not all(map(math.isfinite, numbers)):
        raise ConfigError(f"--workload: {name}: write it as {name.partition(':')[0]}:{form}")
    return numbers


def _from_trace(trace: Trace, encode: Encode | None) -> _Source:
    return _Source(
        name=trace.name,
        draw=lambda seed: _trace_lengths(trace, seed, encode),
        longest=trace.longest,
        style=trace.style,
        times=trace.times,
        notes=(*trace.notes, *_count_notes(trace, encode)),
    )


def _count_notes(trace: Trace, encode: Encode | None) -> list[str]:
    if encode is not None or not trace.has_text:
        return []
    return ["lengths of the file's texts are approximations: no tokenizer is known"]


def _trace_lengths(trace: Trace, seed: int, encode: Encode | None) -> Iterator[Lengths]:
    """In the file's order if it has times, since they belong together; else shuffled.

    Shuffled lengths go on in rounds without end. Texts don't: a prefix cache would know them.
    """
    count = approximate_tokens if encode is None else lambda text: len(encode(text))
    if trace.times is not None:
        yield from (row.lengths(count) for row in trace.rows)
        return
    rng = Random(f"order/{seed}")
    for _ in repeat(None, 1) if trace.has_text else repeat(None):
        keys = [rng.random() for _ in trace.rows]
        for number in sorted(range(len(keys)), key=keys.__getitem__):
            yield trace.rows[number].lengths(count)
