"""Traces and data sets that users have: read, checked, and brought into one form.

The format is told from the content: the names in a CSV's header, or the fields of the first JSON
object. Gzipped files are read as they are.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import zlib
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from staffel.bench.workload import Lengths, Style
from staffel.config import ConfigError

Count = Callable[[str], int]


class Row(Struct, frozen=True):
    """One request. Prompt and output are tokens, or texts whose tokens are counted when needed."""

    prompt: int | str
    output: int | str
    at: float | None = None
    """Seconds."""
    prefix: tuple[int, ...] = ()

    def lengths(self, count: Count) -> Lengths:
        prompt = self.prompt if isinstance(self.prompt, int) else count(self.prompt)
        output = self.output if isinstance(self.output, int) else count(self.output)
        text = self.prompt if isinstance(self.prompt, str) else None
        return Lengths(max(1, prompt), max(1, output), self.prefix, text=text)


class Trace(Struct, frozen=True):
    """A whole file."""

    name: str
    """The file's name, and a digest of its content: another content is another workload."""
    rows: list[Row]
    style: Style
    notes: tuple[str, ...]

    @property
    def times(self) -> list[float] | None:
        """Arrivals in seconds from the first; None where the file has none."""
        first = self.rows[0].at
        return (
            None if first is None else [row.at - first for row in self.rows if row.at is not None]
        )

    @property
    def has_text(self) -> bool:
        return any(isinstance(row.prompt, str) or isinstance(row.output, str) for row in self.rows)

    @property
    def longest(self) -> float:
        """Most tokens of a request; infinite where texts aren't counted yet."""
        if self.has_text:
            return float("inf")
        return max(int(row.prompt) + int(row.output) for row in self.rows)


class _Line(NamedTuple):
    """One record, and where it stands: "trace.csv: line 7"."""

    place: str
    fields: dict[str, Any]

    def error(self, field: str, problem: str) -> ConfigError:
        return ConfigError(f"--workload: {self.place}: {field}: {problem}")

    def number(self, field: str) -> float:
        value = self.fields.get(field)
        try:
            number = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            raise self.error(field, f"{value!r} is not a number") from None
        if isinstance(value, bool) or not 0 <= number < float("inf"):
            raise self.error(field, f"{value!r} must be a number of at least 0")
        return number

    def tokens(self, field: str, least: int = 1) -> int:
        number = self.number(field)
        if not number.is_integer() or number < least:
            raise self.error(field, f"{self.fields[field]!r} must be whole tokens, {least} or more")
        return int(number)

    def text(self, field: str) -> str:
        value = self.fields.get(field)
        if not isinstance(value, str) or not value:
            raise self.error(field, f"{value!r} is not a text")
        return value

    def moment(self, field: str) -> float:
        value = self.fields.get(field)
        try:
            moment = datetime.fromisoformat(str(value))
        except ValueError:
            raise self.error(field, f"{value!r} is not like 2023-11-16 18:15:46.68") from None
        # Times without a zone are taken as UTC: a change to summer time would move them.
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


Read = Callable[[_Line], Row | None]
"""None: the record is no request."""


class _Format(NamedTuple):
    name: str
    needs: frozenset[str]
    """Fields by which it is known."""
    read: Read
    left_out: str = ""
    """What a record is that is no request."""
    style: Style = "prose"


def read_trace(path: Path) -> Trace:
    """The requests of a file of any known format.

    Raises:
        ConfigError: an unknown format, or a record that is broken: the text names file, line and
            field.
    """
    data = _content(path)
    form, lines = _recognise(path, data)
    read = [form.read(line) for line in lines]
    rows = [row for row in read if row is not None]
    if not rows:
        raise ConfigError(f"--workload: {path}: no request in it (read as {form.name})")
    _check_times(path, rows)
    return Trace(
        name=f"file:{path.name}#{hashlib.sha256(data).hexdigest()[:8]}",
        rows=rows,
        style=form.style,
        notes=_notes(form, len(read) - len(rows), len(read)),
    )


def _notes(form: _Format, left_out: int, total: int) -> tuple[str, ...]:
    if not left_out:
        return ()
    return (f"{left_out} of the file's {total} records left out: {form.left_out}",)


def _check_times(path: Path, rows: list[Row]) -> None:
    times = [row.at for row in rows if row.at is not None]
    if times and len(times) != len(rows):
        raise ConfigError(f"--workload: {path}: at: give it for all requests or for none")
    for number, (before, after) in enumerate(pairwise(times), start=2):
        if after < before:
            raise ConfigError(
                f"--workload: {path}: request {number} comes before the one above it; "
                "sort the file by time"
            )


# --- telling formats apart ---


def _content(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"--workload: {path}: {error}") from None


def _recognise(path: Path, data: bytes) -> tuple[_Format, Iterable[_Line]]:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--workload: {path}: is not UTF-8 text: {error}") from None
    start = text.lstrip()[:1]
    if start == "[":
        lines = list(_json_array(path, text))
    elif start == "{":
        lines = list(_json_lines(path, text))
    else:
        lines = list(_csv_lines(path, text))
    return _format_of(path, lines), lines


def _format_of(path: Path, lines: list[_Line]) -> _Format:
    if not lines:
        raise ConfigError(f"--workload: {path}: has no record")
    fields = lines[0].fields.keys()
    for form in FORMATS:
        if form.needs <= fields:
            return form
    known = "; ".join(f"{form.name}: {', '.join(sorted(form.needs))}" for form in FORMATS)
    raise ConfigError(
        f"--workload: {lines[0].place}: fields {', '.join(map(str, fields))} are of no known "
        f"format ({known})"
    )


def _csv_lines(path: Path, text: str) -> Iterator[_Line]:
    reader = csv.DictReader(io.StringIO(text, newline=""), restkey="(more)")
    for fields in reader:
        yield _Line(f"{path}: line {reader.line_num}", fields)


def _json_lines(path: Path, text: str) -> Iterator[_Line]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield _record(f"{path}: line {number}", _json(f"{path}: line {number}", line))


def _json_array(path: Path, text: str) -> Iterator[_Line]:
    for number, value in enumerate(_json(str(path), text), start=1):
        yield _record(f"{path}: record {number}", value)


def _json(place: str, text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise ConfigError(f"--workload: {place}: {error}") from None


def _record(place: str, value: Any) -> _Line:
    if not isinstance(value, dict):
        raise ConfigError(f"--workload: {place}: is no JSON object")
    return _Line(place, value)


# --- the formats ---


def _azure(line: _Line) -> Row:
    prompt, output = line.tokens("ContextTokens"), line.tokens("GeneratedTokens")
    return Row(prompt, output, line.moment("TIMESTAMP"))


def _burst(line: _Line) -> Row | None:
    prompt, output = line.tokens("Request tokens", 0), line.tokens("Response tokens", 0)
    return Row(prompt, output, line.number("Timestamp")) if prompt and output else None


def _vidur(line: _Line) -> Row:
    return Row(line.tokens("num_prefill_tokens"), line.tokens("num_decode_tokens"))


def _mooncake(line: _Line) -> Row:
    ids = line.fields["hash_ids"]
    if not isinstance(ids, list) or not all(type(key) is int for key in ids):
        raise line.error("hash_ids", "must be a list of whole numbers")
    prompt, output = line.tokens("input_length"), line.tokens("output_length")
    return Row(prompt, output, line.number("timestamp") / 1000, tuple(ids))


def _human_eval(line: _Line) -> Row:
    return Row(line.text("prompt"), line.text("canonical_solution"))


def _share_gpt(line: _Line) -> Row | None:
    """The first turn of a person that is followed by a reply."""
    turns = line.fields["conversations"]
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise line.error("conversations", "must be a list of objects with from and value")
    for asked, reply in pairwise(turns):
        if asked.get("from") in ("human", "user") and reply.get("from") in ("gpt", "assistant"):
            texts = _Line(line.place, {"prompt": asked.get("value"), "reply": reply.get("value")})
            return _spoken(texts)
    return None


def _spoken(texts: _Line) -> Row | None:
    if not all(texts.fields.values()):
        return None
    return Row(texts.text("prompt"), texts.text("reply"))


def _own(line: _Line) -> Row:
    if "prompt" in line.fields and "prompt_tokens" in line.fields:
        raise line.error("prompt_tokens", "goes without prompt: a text has its own length")
    known = {"prompt", "prompt_tokens", "output_tokens", "at"}
    if unknown := line.fields.keys() - known:
        raise line.error(sorted(unknown)[0], f"is unknown; there are {', '.join(sorted(known))}")
    prompt = line.text("prompt") if "prompt" in line.fields else line.tokens("prompt_tokens")
    at = line.number("at") if "at" in line.fields else None
    return Row(prompt, line.tokens("output_tokens"), at)


FORMATS = (
    _Format("Azure CSV", frozenset({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}), _azure),
    _Format(
        "BurstGPT CSV",
        frozenset({"Timestamp", "Request tokens", "Response tokens"}),
        _burst,
        "failed requests, with no tokens",
    ),
    _Format("Vidur CSV", frozenset({"num_prefill_tokens", "num_decode_tokens"}), _vidur),
    _Format(
        "Mooncake JSONL",
        frozenset({"timestamp", "input_length", "output_length", "hash_ids"}),
        _mooncake,
    ),
    _Format(
        "HumanEval JSONL", frozenset({"prompt", "canonical_solution"}), _human_eval, "", "code"
    ),
    _Format(
        "ShareGPT JSON",
        frozenset({"conversations"}),
        _share_gpt,
        "conversations without a person's turn and a reply to it",
    ),
    _Format("JSONL of its own", frozenset({"output_tokens"}), _own),
)
