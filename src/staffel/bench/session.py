"""One measurement from start to end: set up, measure, write, show. What the commands call."""

from __future__ import annotations

import asyncio
import platform
import signal
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from rich.console import Console

import staffel
from staffel.bench.arrivals import Arrivals
from staffel.bench.encoders import Encode, folder_encode, server_encode
from staffel.bench.endpoint import Endpoint
from staffel.bench.measure import Measurement, Subject
from staffel.bench.preflight import discover
from staffel.bench.presets import slo_preset
from staffel.bench.progress import Progress
from staffel.bench.prompts import PromptMaker
from staffel.bench.results import Kind, Result
from staffel.bench.workload import Workload
from staffel.bench.workloads import parse_workload
from staffel.config import SLO, ConfigError


class Options(Struct, frozen=True, kw_only=True):
    """What all measurements take."""

    url: str
    command: str
    workload: str = "chatbot"
    slo: str | None = None
    attainment: float = 0.9
    devices: int = 1
    label: str | None = None
    arrivals: str = "poisson"
    seed: int = 0
    scale_lengths: float = 1.0
    shared_prefix: int = 0
    api: str = "completions"
    api_key: str | None = None
    model: str | None = None
    tokenizer: Path | None = None
    token_prompts: bool = False
    ignore_eos: bool = True
    extra_body: str | None = None
    timeout: float = 600.0
    processes: int | None = None
    output: Path | None = None
    report: Path | None = None
    quiet: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.attainment < 1:
            raise ConfigError("--attainment: must lie between 0 and 1, like 0.9")
        if self.devices < 1:
            raise ConfigError("--devices: must be at least 1")


class Session:
    """A measurement that is set up: the subject, the SLO, and what the user is shown."""

    def __init__(
        self, options: Options, subject: Subject, slo: SLO | None, progress: Progress
    ) -> None:
        self.subject = subject
        self.slo = slo
        self.stop = asyncio.Event()
        """Set by Ctrl-C and by SIGTERM, as a time limit sends it."""
        self._options = options
        self._progress = progress
        self._measurement: Measurement | None = None
        self._started = datetime.now(UTC).isoformat(timespec="seconds")

    @property
    def measurement(self) -> Measurement:
        """Probes under the SLO that was given."""
        if self._measurement is None:
            assert self.slo is not None
            self._measurement = Measurement(
                self.subject, self.slo, self._options.attainment, self._progress, self.stop
            )
        return self._measurement

    def result(self, kind: Kind, **found: Any) -> Result:
        """Everything that is known so far."""
        options, endpoint = self._options, self.subject.endpoint
        probes = self._measurement.probes if self._measurement is not None else []
        notes = [*endpoint.notes, *self.subject.notes, *found.pop("notes", [])]
        return Result(
            kind=kind,
            command=options.command,
            started=self._started,
            versions={"staffel": staffel.__version__, "python": platform.python_version()},
            url=endpoint.url,
            model=endpoint.model,
            workload=self.subject.workload.name,
            arrivals=str(self.subject.arrivals),
            seed=options.seed,
            slo=self.slo,
            target=options.attainment,
            devices=options.devices,
            label=options.label or endpoint.url,
            probes=found.pop("probes", probes),
            notes=notes,
            interrupted=self.stop.is_set(),
            **found,
        )


def measure(options: Options, work: Callable[[Session], Awaitable[Result]]) -> Result:
    """Set up, run `work`, and save its result. Ctrl-C or SIGTERM ends the work; what there is is
    kept.

    Raises:
        ConfigError: something in the options can't be had, or the endpoint can't be measured.
    """
    return asyncio.run(_measure(options, work))


async def _measure(options: Options, work: Callable[[Session], Awaitable[Result]]) -> Result:
    if options.output is not None:
        _check_writable(options.output)
    slo = read_slo(options.slo) if options.slo is not None else None
    progress = Progress(Console(stderr=True), shown=not options.quiet)
    try:
        session = Session(options, await make_subject(options), slo, progress)
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, session.stop.set)
        result = await work(session)
    finally:
        progress.close()
    if options.output is not None:
        result.save(options.output)
    return result


async def make_subject(options: Options) -> Subject:
    """The endpoint, looked at, and what it will be asked."""
    endpoint = await discover(
        options.url,
        api_key=options.api_key,
        model=options.model,
        api=_api(options.api),
        extra=_extra(options.extra_body),
        timeout=options.timeout,
        tokenizer=options.tokenizer,
        ignore_eos=options.ignore_eos,
    )
    encode, notes = await asyncio.to_thread(_encode, options, endpoint)
    workload = parse_workload(
        options.workload,
        scale_lengths=options.scale_lengths,
        shared_prefix=options.shared_prefix,
        max_model_len=endpoint.max_model_len,
        encode=encode,
    )
    subject = Subject(
        endpoint,
        workload,
        partial(_maker, encode, workload, options),
        Arrivals.parse(options.arrivals),
        seed=options.seed,
        processes=options.processes,
    )
    subject.notes += notes
    return subject


def _maker(encode: Encode | None, workload: Workload, options: Options, seed: int) -> PromptMaker:
    return PromptMaker(encode, seed=seed, style=workload.style, as_ids=options.token_prompts)


def _encode(options: Options, endpoint: Endpoint) -> tuple[Encode | None, list[str]]:
    """By the tokenizer given, else by the server's /tokenize, else not at all."""
    if options.tokenizer is not None:
        return folder_encode(options.tokenizer), []
    try:
        encode = server_encode(options.url, model=endpoint.model, api_key=options.api_key)
        encode("probe")
    except ConfigError:
        note = "prompt lengths are approximate: no --tokenizer is given, and the server has none"
        return None, [note]
    return lru_cache(maxsize=None)(encode), []


def read_slo(text: str) -> SLO:
    """From "ttft=0.25,tpot=0.1", a preset's name, or a file that `staffel bench slo` wrote."""
    if text.startswith("auto:"):
        raise ConfigError(
            "--slo: auto: is for `staffel bench slo`, which writes a file; use that one file for "
            "all that are compared, or a slower server earns a laxer SLO"
        )
    path = Path(text).expanduser()
    if path.is_file():
        return SLO.load(path)
    return SLO.parse(text) if "=" in text else slo_preset(text)


def _check_writable(path: Path) -> None:
    """Before anything is measured; leaves no empty file behind that looks like a result."""
    there = path.exists()
    try:
        with path.open("ab"):
            pass
        if not there:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"--output: {path} can't be written: {error.strerror}") from None


def _api(text: str) -> Any:
    if text not in ("completions", "chat"):
        raise ConfigError("--api: must be completions or chat")
    return text


def _extra(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(f"--extra-body: {error}; give a JSON object") from None
