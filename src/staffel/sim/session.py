"""One simulation from the command line's words to its result."""

from __future__ import annotations

import gzip
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast, get_args

import msgspec
from msgspec import Struct

import staffel
from staffel.bench.arrivals import Arrivals
from staffel.bench.results import Interval, Probe, Result
from staffel.bench.session import read_slo
from staffel.bench.workload import Workload
from staffel.bench.workloads import parse_workload
from staffel.config import SLO, ConfigError, ParallelSpec, Placement, Role, check_choice
from staffel.latency.hardware import WEIGHT_BYTES, hardware_named
from staffel.latency.link import parse_bandwidth
from staffel.latency.profile import Profile
from staffel.latency.shape import Mla, shape_of
from staffel.sim.goodput import (
    REQUESTS,
    SimulatedGoodput,
    arrivals_at,
    needs_token_times,
    simulated_goodput,
)
from staffel.sim.models import shell_of
from staffel.sim.outcome import Outcome
from staffel.sim.sources import Setting, Sheet, check_source, from_profile
from staffel.sim.system import simulate


class Options(Struct, frozen=True, kw_only=True):
    """What the command takes."""

    command: str
    profile: Path | None = None
    hardware: str | None = None
    model: str | None = None
    dtype: str | None = None
    mla: str | None = None
    placement: Path | None = None
    prefill: int | None = None
    decode: int | None = None
    colocated: int | None = None
    instance: dict[str, Any] = {}
    """Fields of every InstanceSpec that were given."""
    tp: int = 1
    pp: int = 1
    link: str | None = None
    host_cpu: str | None = None
    workload: str = "chatbot"
    scale_lengths: float = 1.0
    shared_prefix: int = 0
    max_model_len: int | None = None
    arrivals: str = "poisson"
    rate: float | None = None
    slo: str
    attainment: float = 0.9
    requests: int = REQUESTS
    seed: int = 0


class Simulated(Struct, frozen=True):
    """What came out."""

    result: Result
    """As a measurement would have it."""
    setting: Setting
    outcome: Outcome
    """At the rate asked for, or at the goodput."""
    goodput: SimulatedGoodput | None

    def save(self, path: Path) -> None:
        """The benchmark's JSON, with what went on inside under a key of its own."""
        whole = msgspec.to_builtins(self.result) | {"inside": inside(self)}
        data = msgspec.json.encode(whole)
        path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def run(options: Options) -> Simulated:
    """Raises ConfigError naming the option that is wrong."""
    setting = _setting(options)
    if options.link is not None:
        setting = setting.over(parse_bandwidth(options.link, "--link"))
    workload = parse_workload(
        options.workload,
        scale_lengths=options.scale_lengths,
        shared_prefix=options.shared_prefix,
        max_model_len=options.max_model_len,
    )
    slo, arrivals = read_slo(options.slo), Arrivals.parse(options.arrivals)
    shell = shell_of(options.host_cpu)
    found, rate = None, options.rate
    if rate is None:
        found = simulated_goodput(
            setting.instances, setting.link, workload, slo, options.attainment,
            seed=options.seed, requests=options.requests, process=arrivals, shell=shell,
        )  # fmt: skip
        rate = found.rate or found.probes[-1].rate
    asked = arrivals_at(workload, rate, options.requests, options.seed, arrivals)
    outcome = simulate(
        setting.instances, setting.link, asked, token_times=needs_token_times(slo), shell=shell
    )
    probe = outcome.probe(slo, rate)
    result = _result(options, setting, workload, slo, probe, found)
    return Simulated(result, setting, outcome, found)


def _result(
    options: Options,
    setting: Setting,
    workload: Workload,
    slo: SLO,
    probe: Probe,
    found: SimulatedGoodput | None,
) -> Result:
    return Result(
        kind="run" if found is None else "goodput",
        command=options.command,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={"staffel": staffel.__version__},
        url="simulation",
        model=setting.model,
        workload=workload.name,
        arrivals=options.arrivals,
        seed=options.seed,
        slo=slo,
        target=options.attainment,
        devices=setting.devices,
        label=f"{setting.placement}, simulated",
        probes=[probe],
        goodput=_interval(found) if found is not None and found.rate else None,
        notes=[setting.basis, *workload.notes],
    )


def _interval(found: SimulatedGoodput) -> Interval:
    """From the highest rate found good to the lowest one found bad."""
    bad = min((probe.rate for probe in found.probes if not probe.good), default=found.rate)
    return Interval(found.rate, found.rate, max(bad, found.rate))


# ---- what is simulated


def _setting(options: Options) -> Setting:
    check_source(options.profile, options.hardware, options.model)
    if options.profile is not None:
        return _from_profile(options, options.profile)
    return _from_sheet(options)


def _from_profile(options: Options, path: Path) -> Setting:
    for name in ("model", "dtype", "mla"):
        if getattr(options, name) is not None:
            raise ConfigError(f"--{name}: goes with --hardware; the profile names its own")
    profile = Profile.load(path)
    given = {"quantization": profile.quantization, **options.instance}
    return from_profile(profile, _placement(options, given))


def _from_sheet(options: Options) -> Setting:
    assert options.hardware is not None
    assert options.model is not None
    dtype, mla = options.dtype or "bfloat16", options.mla or "compressed"
    check_choice("--dtype", dtype, tuple(WEIGHT_BYTES))
    check_choice("--mla", mla, get_args(Mla))
    shape = shape_of(options.model, mla=cast(Mla, mla))
    sheet = Sheet(hardware_named(options.hardware), options.model, shape, dtype)
    return sheet.setting(_placement(options, dict(options.instance)))


def _placement(options: Options, given: dict[str, Any]) -> Placement:
    """The file's, or that of the counts: 1P1D without any."""
    counts: dict[Role, int | None] = {
        "prefill": options.prefill, "decode": options.decode, "colocated": options.colocated,
    }  # fmt: skip
    if options.placement is not None:
        named = [name for name, count in counts.items() if count is not None]
        named += [*options.instance, *(n for n in ("tp", "pp") if getattr(options, n) != 1)]
        if named:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in named)
            raise ConfigError(f"--placement: can't be combined with {names}; put it in the file")
        return Placement.load(options.placement)
    return Placement.of_counts(
        counts, given | {"parallel": ParallelSpec(tp=options.tp, pp=options.pp)}
    )


# ---- what went on inside


def inside(simulated: Simulated) -> dict[str, Any]:
    """Instances, queue and handoffs; times in seconds."""
    outcome = simulated.outcome
    handoffs = sorted(outcome.handoffs())
    return {
        "placement": simulated.setting.placement,
        "basis": simulated.setting.basis,
        "seconds": outcome.seconds,
        "instances": [
            {
                "name": use.name,
                "role": use.role,
                "devices": use.devices,
                "utilisation": outcome.utilisation(use),
                "steps": use.steps,
                "prompt_tokens": use.prompt_tokens,
                "decode_tokens": use.decode_tokens,
                "preemptions": use.preemptions,
                "samples": [sample._asdict() for sample in use.samples],
            }
            for use in outcome.instances
        ],
        "queue": outcome.queue,
        "handoff": {share: quantile(handoffs, share) for share in (50, 90, 99)},
        "read": {share: quantile(sorted(outcome.reads()), share) for share in (50, 90, 99)},
        "probes": []
        if simulated.goodput is None
        else msgspec.to_builtins(simulated.goodput.probes),
    }


def quantile(ordered: list[float], share: int) -> float | None:
    """Nearest rank; None of nothing."""
    return ordered[max(0, math.ceil(share / 100 * len(ordered)) - 1)] if ordered else None
