"""How near the simulator comes to the server: the same arrivals, really served and simulated.

    python benchmarks/sim_accuracy.py [--quick] [--requests N] [--rates R,R,...] [--minutes M]

For 1P1D and for two colocated instances with chunked prefill, one thread each: profiles this
machine, and serves at five rates, those at which the simulator expects the attainments in `AIMS`.
Every cell is really run twice, with the same requests at the same times; the simulator gets what
was sent, from the benchmark's own file. What the shell adds to the executor's steps is taken from
the journal of a short run apart from those that are compared, and the CPU time that server and load
generator take from the instances' cores from others (`host_cpu.py`). All requests count, with no
warm-up cut off on either side.

A machine isn't as fast at all times, and a virtual one's cores are now nearer to each other, now
farther. So each placement's runs are profiled once more afterwards, and simulated by that as well:
what the two say differently, no simulation could know. And they are simulated once more with steps
as long as they really were, in the mean of each phase, by the server's journal: what is wrong then
is not the steps.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import msgspec
import numpy as np
from goodput_placements import PORT, RESULTS, URL, bench_run, serving, staffel
from host_cpu import measure as measure_host_cpu
from journal_steps import Seen, read

from staffel.bench.records import Record
from staffel.bench.results import Probe
from staffel.bench.summary import percentile, values
from staffel.bench.workloads import parse_workload
from staffel.config import SLO, parse_bytes
from staffel.latency.model import FittedModel, Regime, Work, phase_of
from staffel.latency.profile import Profile
from staffel.sim.goodput import arrivals_at
from staffel.sim.models import Arrival, InstanceModel, LinkModel, Shell
from staffel.sim.system import simulate
from staffel.terminal import out, print_table

WORKLOAD = "lognormal:80,0.5,24,0.5"
KV_MEMORY = "512MiB"
OPTIONS = ["--threads", "1", "--kv-memory", KV_MEMORY, "--no-prefix-cache"]
"""The same prompts come again; the simulator has none that are alike."""
PLACEMENTS = {
    "1P1D": ["--prefill", "1", "--decode", "1"],
    "2C-chunked": ["--colocated", "2", "--policy", "chunked"],
}
ROLES = {"1P1D": ("prefill", "decode"), "2C-chunked": ("colocated", "colocated")}
AIMS = (0.97, 0.9, 0.75, 0.55, 0.3)
"""Attainments."""
TTFT_FACTOR, TPOT_FACTOR = 5, 2.5
"""The SLO, as multiples of a step that computes the mean prompt, or decodes it alone."""
REAL_RUNS = 2
SEED = 1


class Figures(NamedTuple):
    """Of one run. Seconds."""

    attainment: float
    ttft_p50: float
    ttft_p90: float
    tpot_p50: float
    tpot_p90: float


class Steps(NamedTuple):
    """How long steps really took, in one run."""

    lines: dict[str, tuple[float, float]]
    """By phase: seconds more, and times as long, as by the profile, its slowdown left out."""
    gap_s: float
    """Between two of an instance."""


class Machine(NamedTuple):
    """What is known of it before anything is compared."""

    profile: Profile
    shell: Shell
    slo: SLO


class Cell(NamedTuple):
    placement: str
    rate: float
    requests: int
    real: list[Figures]
    simulated: Figures
    """By the profile that was made before."""
    afterwards: Figures
    """By the one that was made after the runs."""
    stepped: list[Figures]
    """Simulated for each real run, with steps as long as they were in it."""
    steps: list[Steps]
    """Of each real run."""
    kept_up: bool
    """False: the load generator was late in one of the real runs."""


# ---- the simulated side


def as_stepped(machine: Machine, steps: Steps) -> Machine:
    """A machine whose steps are so long, whatever it is that lengthens them."""
    model = machine.profile.for_tp(1)
    longer = FittedModel(
        **{
            phase: tuple(_longer(regime, *steps.lines.get(phase, (0.0, 1.0))) for regime in regimes)
            for phase, regimes in msgspec.structs.asdict(model).items()
        }
    )
    profile = msgspec.structs.replace(machine.profile, models={1: longer}, slowdown={})
    shell = replace(machine.shell, step_s=steps.gap_s, cpu=None)
    return machine._replace(profile=profile, shell=shell)


def _longer(regime: Regime, seconds: float, times: float) -> Regime:
    costs = msgspec.structs.asdict(regime)
    bound, constant = costs.pop("up_to"), costs.pop("constant")
    scaled = {name: times * cost for name, cost in costs.items()}
    return Regime(up_to=bound, constant=times * constant + seconds, **scaled)


def instances(placement: str, profile: Profile) -> list[InstanceModel]:
    return [
        InstanceModel(
            role=role,
            latency=profile.for_tp(1),
            kv_tokens=parse_bytes(KV_MEMORY) // profile.kv_bytes_per_token,
            slowdown=profile.slowdown,
        )
        for role in ROLES[placement]
    ]


def simulated(placement: str, machine: Machine, arrivals: list[Arrival]) -> list[Record]:
    profile = machine.profile
    transfer = profile.transfer
    link = LinkModel(transfer.bytes_per_second, transfer.fixed_s, profile.kv_bytes_per_token)
    return simulate(instances(placement, profile), link, arrivals, shell=machine.shell).records


def expected(placement: str, machine: Machine, rate: float, requests: int) -> float:
    """Attainment, by the simulator."""
    arrivals = arrivals_at(parse_workload(WORKLOAD), rate, requests, SEED)
    return figures(simulated(placement, machine, arrivals), machine.slo).attainment


def rate_for(aim: float, placement: str, machine: Machine, requests: int) -> float:
    """The rate at which the simulator expects that attainment, by bisection."""
    low, high = 0.01, 100.0
    while high / low > 1.02:
        middle = (low * high) ** 0.5
        if expected(placement, machine, middle, requests) > aim:
            low = middle
        else:
            high = middle
    return float(f"{low:.3g}")


def slo_of(profile: Profile) -> SLO:
    mean = int(float(WORKLOAD.removeprefix("lognormal:").split(",")[0]))
    model = profile.for_tp(1)
    return SLO(
        ttft=round(TTFT_FACTOR * model.step_seconds(Work.prefill(mean)), 3),
        tpot=round(TPOT_FACTOR * model.step_seconds(Work.decode(1, mean)), 4),
    )


# ---- the real side


def really(folder: Path, name: str, rate: float, requests: int, slo: SLO) -> Probe:
    return bench_run(folder / f"{name}.json.gz", WORKLOAD, rate, requests, str(slo), SEED)


def shell_costs(folder: Path, slo: SLO) -> Shell:
    """By the journal of a run in which requests hardly meet, and three in which they do."""
    journal = _new_journal(folder, "shell")
    with serving([*PLACEMENTS["1P1D"], *OPTIONS, "--record", str(journal)]):
        records = really(folder, "shell", 0.7, 20, slo).records
    with journal.open("rb") as lines:
        seen = read(lines)
    inside = list(seen.first_tokens.values())[-len(records) :]  # the generator asks once before
    outside = [
        ttft - first / 1e9 for ttft, first in zip(values(records, "ttft"), inside, strict=True)
    ]
    return Shell(
        message_s=median(seen.messages) / 1e9,
        step_s=median(gap for _, gap in seen.gaps) / 1e9,
        request_s=max(median(outside), 0.0),
        cpu=measure_host_cpu(),
    )


def _new_journal(folder: Path, name: str) -> Path:
    journal = folder / f"{name}.jsonl"
    journal.unlink(missing_ok=True)
    return journal


def arrivals_of(records: list[Record]) -> list[Arrival]:
    """What was sent, as the server counted it."""
    return [
        Arrival(round(1e9 * r.scheduled), r.prompt_tokens or 1, r.tokens or r.asked_tokens)
        for r in sorted(records, key=lambda record: record.scheduled)
    ]


class Real(NamedTuple):
    """One run, and when it was: nanoseconds of the monotonic clock, as the journal's are."""

    probe: Probe
    began: int
    ended: int


class Run(NamedTuple):
    """What was really done at one rate."""

    placement: str
    rate: float
    real: list[Real]


def timed(folder: Path, name: str, rate: float, requests: int, slo: SLO) -> Real:
    began = time.monotonic_ns()
    probe = really(folder, name, rate, requests, slo)
    return Real(probe, began, time.monotonic_ns())


def serve(
    folder: Path, placement: str, machine: Machine, rates: list[float], requests: int
) -> tuple[list[Run], Seen]:
    """All runs of one placement, and its journal. The two of a rate lie far apart in time."""
    slo, journal = machine.slo, _new_journal(folder, placement)
    with serving([*PLACEMENTS[placement], *OPTIONS, "--record", str(journal)]):
        really(folder, f"{placement}-warm-up", rates[0], 10, slo)
        runs = [
            [timed(folder, f"{placement}-{rate:g}-{run}", rate, requests, slo) for rate in rates]
            for run in range(REAL_RUNS)
        ]
    found = [Run(placement, rate, list(real)) for rate, *real in zip(rates, *runs, strict=True)]
    with journal.open("rb") as lines:
        seen = read(lines)
    journal.unlink()
    return found, seen


def steps_of(real: Real, seen: Seen, profile: Profile) -> Steps:
    """By least squares, which leave the mean as it is: on it a queue depends."""
    model = profile.for_tp(1)
    pairs: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for step in seen.steps:
        if real.began <= step.begin <= real.ended and (step.work.prompts or step.work.decodes):
            took = (step.end - step.begin) / 1e9
            pairs[phase_of(step.work)].append((model.step_seconds(step.work), took))
    gaps = [gap for at, gap in seen.gaps if real.began <= at <= real.ended]
    return Steps({phase: _line(found) for phase, found in pairs.items()}, fmean(gaps) / 1e9)


def _line(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    expected, took = np.array(pairs).T
    slope, start = np.polyfit(expected, took, 1)
    return float(start), float(slope)


def compare(run: Run, seen: Seen, machine: Machine, after: Machine) -> Cell:
    """The real runs of a rate beside simulations of what the first one sent."""
    probes = [real.probe for real in run.real]
    sent = arrivals_of(probes[0].records)
    steps = [steps_of(real, seen, machine.profile) for real in run.real]

    def by(machine: Machine) -> Figures:
        return figures(simulated(run.placement, machine, sent), machine.slo)

    return Cell(
        placement=run.placement,
        rate=run.rate,
        requests=len(sent),
        real=[figures(probe.records, machine.slo) for probe in probes],
        simulated=by(machine),
        afterwards=by(after),
        stepped=[by(as_stepped(machine, one)) for one in steps],
        steps=steps,
        kept_up=all(probe.generator.kept_up for probe in probes),
    )


# ---- side by side


def figures(records: list[Record], slo: SLO) -> Figures:
    met = sum(not record.missed(slo) for record in records)
    times = [
        percentile(values(records, name), share) for name in ("ttft", "tpot") for share in (50, 90)
    ]
    return Figures(met / len(records), *(time if time is not None else 0.0 for time in times))


def mean_of(runs: list[Figures]) -> Figures:
    return Figures(*(sum(column) / len(column) for column in zip(*runs, strict=True)))


def spread_of(runs: list[Figures]) -> Figures:
    return Figures(*(max(column) - min(column) for column in zip(*runs, strict=True)))


def judged(cell: Cell, simulation: Figures) -> dict[str, Any]:
    """How far off, and whether that is within the target: attainment within 2 points or the
    spread of the real runs, whichever is larger; P90s within 10 %."""
    real, spread = mean_of(cell.real), spread_of(cell.real)
    off = simulation.attainment - real.attainment
    p90 = {
        name: getattr(simulation, name) / getattr(real, name) - 1
        for name in ("ttft_p90", "tpot_p90")
    }
    return {
        "attainment_off": off,
        "attainment_spread": spread.attainment,
        "attainment_within": abs(off) <= max(0.02, spread.attainment),
        **{f"{name}_off": error for name, error in p90.items()},
        "p90_within": all(abs(error) <= 0.1 for error in p90.values()),
    }


def table(cells: list[Cell]) -> list[list[str]]:
    head = ["placement, requests/s", "", "met", *(f"{m} {p}, ms" for m in ("TTFT", "TPOT")
            for p in ("P50", "P90"))]  # fmt: skip
    rows = []
    for cell in cells:
        rows.append([f"{cell.placement}, {cell.rate:g}", "real", *_row(mean_of(cell.real))])
        rows.append(["", "spread", *_row(spread_of(cell.real))])
        rows.append(["", "simulated", *_row(cell.simulated)])
        rows.append(["", "by the profile afterwards", *_row(cell.afterwards)])
        rows.append(["", "by steps as they were", *_row(mean_of(cell.stepped))])
    return [head, *rows]


TYPICAL = {
    "prefill": Work.prefill(80),
    "decode": Work.decode(4, 100),
    "mixed": Work(*(a + b for a, b in zip(Work.prefill(80), Work.decode(4, 100), strict=True))),
}


def drift(before: Profile, after: Profile) -> dict[str, float]:
    """How many times longer the machine took in the end for a typical step of each phase."""
    return {
        phase: after.for_tp(1).step_seconds(work) / before.for_tp(1).step_seconds(work)
        for phase, work in TYPICAL.items()
    }


def _row(run: Figures) -> list[str]:
    return [f"{run.attainment:.1%}", *(f"{1e3 * seconds:.0f}" for seconds in run[1:])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS / "sim_accuracy")
    parser.add_argument("--requests", type=int, default=400, help="of each run")
    parser.add_argument("--minutes", default="2", help="for each profile")
    parser.add_argument("--rates", help="with commas; by default by the simulator's expectation")
    parser.add_argument("--placement", choices=PLACEMENTS, help="this one only")
    parser.add_argument("--quick", action="store_true", help="two rates, 50 requests: a trial")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    _check_free()
    requests = 50 if options.quick else options.requests
    minutes = "0.7" if options.quick else options.minutes
    rates = [float(rate) for rate in options.rates.split(",")] if options.rates else None
    aims = AIMS[1::2] if options.quick else AIMS
    machine: Machine | None = None
    cells: list[Cell] = []
    drifts: list[dict[str, float]] = []
    for placement in [options.placement] if options.placement else PLACEMENTS:
        profile = _profile(options.out, f"{placement}-before", minutes)
        if machine is None:
            slo = slo_of(profile)
            machine = Machine(profile, shell_costs(options.out, slo), slo)
            out.print(f"SLO: {slo}; {machine.shell}", highlight=False, soft_wrap=True)
        machine = machine._replace(profile=profile)
        wanted = rates or [rate_for(aim, placement, machine, requests) for aim in aims]
        runs, seen = serve(options.out, placement, machine, wanted, requests)
        after = machine._replace(profile=_profile(options.out, f"{placement}-after", minutes))
        cells += [compare(run, seen, machine, after) for run in runs]
        drifts.append(drift(machine.profile, after.profile))
    assert machine is not None
    print_table(table(cells))
    _save(options.out.with_suffix(".json"), machine, drifts, cells)


def _check_free() -> None:
    """Or the runs would measure a server that is somebody else's."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", PORT)):
        raise SystemExit(f"something serves at {URL} already; stop it first")


def _profile(folder: Path, when: str, minutes: str) -> Profile:
    file = folder / f"profile-{when}.json"
    command = staffel("profile", "-o", str(file), "--threads", "1", "--budget", minutes)
    subprocess.run([*command, "--max-model-len", "1024", "--kv-memory", KV_MEMORY], check=True)
    return Profile.load(file)


def _save(file: Path, machine: Machine, drifts: list[dict[str, float]], cells: list[Cell]) -> None:
    found = {
        "workload": WORKLOAD,
        "slo": machine.slo,
        "shell": machine.shell,
        "versions": machine.profile.versions,
        "date": machine.profile.date,
        "drift": drifts,
        "cells": [_plain(cell) for cell in cells],
    }
    file.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    for one in drifts:
        slower = ", ".join(f"{name} {ratio:.2f}" for name, ratio in one.items())
        out.print(f"steps by the profile afterwards over those by the one before: {slower}")
    for name in ("judged", "judged_stepped"):
        attainment, p90 = (
            sum(cell[name][key] for cell in found["cells"])
            for key in ("attainment_within", "p90_within")
        )
        out.print(f"{name}: of {len(cells)} cells within the target: {attainment}, P90: {p90}")


def _plain(cell: Cell) -> dict[str, Any]:
    """With names, for the file."""
    return {
        **cell._asdict(),
        "real": [run._asdict() for run in cell.real],
        "simulated": cell.simulated._asdict(),
        "afterwards": cell.afterwards._asdict(),
        "stepped": [run._asdict() for run in cell.stepped],
        "steps": [steps._asdict() for steps in cell.steps],
        "judged": judged(cell, cell.simulated),
        "judged_stepped": judged(cell, mean_of(cell.stepped)),
    }


if __name__ == "__main__":
    main()
