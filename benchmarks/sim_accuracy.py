"""How near the simulator comes to the server: the same arrivals, really served and simulated.

    python benchmarks/sim_accuracy.py [--quick] [--requests N] [--rates R,R,...] [--minutes M]

Profiles this machine, then serves 1P1D and two colocated instances with chunked prefill, one
thread each, at five rates: those at which the simulator expects the attainments in `AIMS`. Every
cell is really run twice, with the same requests at the same times; the simulator gets what was
sent, from the benchmark's own file. What the shell adds to the executor's steps is taken from the
journal of a short run apart from those that are compared, and the CPU time that the server and the
load generator take from the instances' cores, for each token, from another. All requests count,
with no warm-up cut off on either side.

A machine isn't as fast at all times. So it is profiled once more when all is done, and everything
is simulated again by that: what the two say differently, no simulation could know.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import urllib.request
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec
from goodput_placements import PORT, RESULTS, URL, serving, staffel
from journal_steps import read

from staffel.bench.records import Record
from staffel.bench.results import Probe, Result
from staffel.bench.summary import percentile, values
from staffel.bench.workloads import parse_workload
from staffel.config import SLO, parse_bytes
from staffel.latency.model import Work
from staffel.latency.profile import Profile
from staffel.sim.goodput import arrivals_at
from staffel.sim.models import Arrival, InstanceModel, LinkModel, Shell
from staffel.sim.system import simulate
from staffel.terminal import out, print_table

WORKLOAD = "lognormal:80,0.5,24,0.5"
KV_MEMORY = "512MiB"
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
    kept_up: bool
    """False: the load generator was late in one of the real runs."""


# ---- the simulated side


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
    """One run against the server that is there. That requests were sent late is no failure here:
    the result says so."""
    file = folder / f"{name}.json.gz"
    file.unlink(missing_ok=True)
    subprocess.run(
        staffel(
            "bench", "run", URL, "--rate", str(rate), "--requests", str(requests),
            "--workload", WORKLOAD, "--slo", str(slo), "--seed", str(SEED), "--quiet",
            "-o", str(file),
        ),
        check=False,
    )  # fmt: skip
    return Result.load(file).probes[0]


def shell_costs(folder: Path, slo: SLO) -> Shell:
    """By the journal of a run in which requests hardly meet, and one in which they do."""
    journal = folder / "journal.jsonl"
    journal.unlink(missing_ok=True)
    options = [*PLACEMENTS["1P1D"], "--threads", "1", "--kv-memory", KV_MEMORY]
    with serving([*options, "--record", str(journal)]):
        records = really(folder, "shell", 0.7, 20, slo).records
    with serving(options):
        token_cpu = _token_cpu(folder, slo)
    with journal.open("rb") as lines:
        seen = read(lines)
    outside = median(values(records, "ttft")) - median(seen.first_tokens.values()) / 1e9
    return Shell(
        message_s=median(seen.messages) / 1e9,
        step_s=median(seen.gaps) / 1e9,
        request_s=max(outside, 0.0),
        token_cpu_s=token_cpu,
    )


def _token_cpu(folder: Path, slo: SLO) -> float:
    """CPU seconds for each token, of the server and the load generator."""
    before = _server_cpu()
    probe = really(folder, "cpu", 4, 100, slo)
    server = _server_cpu() - before
    seconds = max(record.ended or 0.0 for record in probe.records)
    tokens = sum(record.tokens for record in probe.records)
    return (server + probe.generator.cpu_share * seconds) / tokens


def _server_cpu() -> float:
    """Seconds so far, its instances' not counted."""
    with urllib.request.urlopen(f"{URL}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    name = "process_cpu_seconds_total "
    return float(next(line for line in lines if line.startswith(name)).removeprefix(name))


def arrivals_of(records: list[Record]) -> list[Arrival]:
    """What was sent, as the server counted it."""
    return [
        Arrival(round(1e9 * r.scheduled), r.prompt_tokens or 1, r.tokens or r.asked_tokens)
        for r in sorted(records, key=lambda record: record.scheduled)
    ]


class Run(NamedTuple):
    """What was really done at one rate."""

    placement: str
    rate: float
    probes: list[Probe]


def measure(
    folder: Path, placement: str, machine: Machine, rates: list[float], requests: int
) -> list[Run]:
    """Of one placement. The two probes of a rate lie far apart in time."""
    slo = machine.slo
    with serving([*PLACEMENTS[placement], "--threads", "1", "--kv-memory", KV_MEMORY]):
        really(folder, f"{placement}-warm-up", rates[0], 10, slo)
        runs = [
            [really(folder, f"{placement}-{rate:g}-{run}", rate, requests, slo) for rate in rates]
            for run in range(REAL_RUNS)
        ]
    return [Run(placement, rate, list(probes)) for rate, *probes in zip(rates, *runs, strict=True)]


def compare(run: Run, machine: Machine, after: Machine) -> Cell:
    """The real runs of a rate beside simulations of what the first one sent."""
    sent, slo = arrivals_of(run.probes[0].records), machine.slo
    return Cell(
        placement=run.placement,
        rate=run.rate,
        requests=len(sent),
        real=[figures(probe.records, slo) for probe in run.probes],
        simulated=figures(simulated(run.placement, machine, sent), slo),
        afterwards=figures(simulated(run.placement, after, sent), slo),
        kept_up=all(probe.generator.kept_up for probe in run.probes),
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


def judged(cell: Cell) -> dict[str, Any]:
    """How far off, and whether that is within the target: attainment within 2 points or the
    spread of the real runs, whichever is larger; P90s within 10 %."""
    real, spread, simulation = mean_of(cell.real), spread_of(cell.real), cell.simulated
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
    parser.add_argument("--quick", action="store_true", help="two rates, 40 requests: a trial")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    _check_free()
    requests = 40 if options.quick else options.requests
    minutes = "0.7" if options.quick else options.minutes
    profile = _profile(options.out, "before", minutes)
    slo = slo_of(profile)
    machine = Machine(profile, shell_costs(options.out, slo), slo)
    out.print(f"SLO: {machine.slo}; {machine.shell}", highlight=False, soft_wrap=True)
    runs: list[Run] = []
    for placement in [options.placement] if options.placement else PLACEMENTS:
        if options.rates:
            rates = [float(rate) for rate in options.rates.split(",")]
        else:
            aims = AIMS[1::2] if options.quick else AIMS
            rates = [rate_for(aim, placement, machine, requests) for aim in aims]
        runs += measure(options.out, placement, machine, rates, requests)
    after = machine._replace(profile=_profile(options.out, "after", minutes))
    cells = [compare(run, machine, after) for run in runs]
    print_table(table(cells))
    _save(options.out.with_suffix(".json"), machine, after, cells)


def _check_free() -> None:
    """Or the runs would measure a server that is somebody else's."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", PORT)):
        raise SystemExit(f"something serves at {URL} already; stop it first")


def _profile(folder: Path, when: str, minutes: str) -> Profile:
    file = folder / f"profile-{when}.json"
    command = staffel("profile", "-o", str(file), "--threads", "1", "--budget", minutes)
    subprocess.run([*command, "--max-model-len", "1024", "--kv-memory", KV_MEMORY], check=True)
    return Profile.load(file)


def _save(file: Path, machine: Machine, after: Machine, cells: list[Cell]) -> None:
    found = {
        "workload": WORKLOAD,
        "slo": machine.slo,
        "shell": machine.shell,
        "versions": machine.profile.versions,
        "date": machine.profile.date,
        "drift": drift(machine.profile, after.profile),
        "cells": [
            {
                **cell._asdict(),
                "real": [run._asdict() for run in cell.real],
                "simulated": cell.simulated._asdict(),
                "afterwards": cell.afterwards._asdict(),
                **judged(cell),
            }
            for cell in cells
        ],
    }
    file.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    within = sum(cell["attainment_within"] for cell in found["cells"])
    p90 = sum(cell["p90_within"] for cell in found["cells"])
    slower = ", ".join(f"{name} {ratio:.2f}" for name, ratio in found["drift"].items())
    out.print(f"steps by the profile afterwards over those by the one before: {slower}")
    out.print(f"of {len(cells)} cells attainment is within the target in {within}, P90 in {p90}")


if __name__ == "__main__":
    main()
