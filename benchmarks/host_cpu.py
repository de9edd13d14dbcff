"""CPU time that server and load generator take for each request, step and token.

    python benchmarks/host_cpu.py [--quick]

Serves 1P1D, one thread each, and sends three loads that differ in what they have most of: requests
of one token, one long answer after another, and long answers side by side. The CPU seconds of the
server, without its instances, and of the generator are fitted to the numbers of requests, of steps
whose tokens went out, and of tokens: what `--host-cpu` of `staffel simulate` and `staffel plan`
takes. The last line is it.
"""

from __future__ import annotations

import argparse
import tempfile
import urllib.request
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from goodput_placements import URL, bench_run, serving
from scipy.optimize import nnls

from staffel.bench.records import Record
from staffel.bench.results import Probe
from staffel.sim.models import HostCpu
from staffel.terminal import out

PLACEMENT = ["--prefill", "1", "--decode", "1", "--threads", "1", "--kv-memory", "512MiB"]
APART_S = 0.003
"""Tokens of one step reach the generator together; those of two steps, so far apart."""


class Load(NamedTuple):
    """What is sent."""

    workload: str
    rate: float
    requests: int


LOADS = (Load("fixed:80,1", 5, 120), Load("fixed:80,150", 0.35, 8), Load("fixed:80,150", 2.5, 40))


class Seen(NamedTuple):
    """What came of it."""

    requests: int
    steps: int
    tokens: int
    cpu_s: float


def host_cpu(seen: Sequence[Seen]) -> HostCpu:
    """By non-negative least squares of the relative error."""
    cpu = np.array([load.cpu_s for load in seen])
    rows = np.array([(load.requests, load.steps, load.tokens) for load in seen]) / cpu[:, None]
    costs, _ = nnls(rows, np.ones(len(seen)))
    return HostCpu(*map(float, costs))


def send(load: Load, number: int) -> Seen:
    """To the server that is there."""
    before = _server_cpu()
    probe = _run(load, number)
    server = _server_cpu() - before
    records = probe.records
    seconds = max(record.ended or 0.0 for record in records)
    return Seen(
        requests=len(records),
        steps=_steps(records),
        tokens=sum(record.tokens for record in records),
        cpu_s=server + probe.generator.cpu_share * seconds,
    )


def measure(loads: Sequence[Load] = LOADS) -> HostCpu:
    with serving(PLACEMENT):
        send(Load("fixed:80,10", 2, 10), 0)  # whatever is done for the first time
        return host_cpu([send(load, number) for number, load in enumerate(loads, 1)])


def _run(load: Load, number: int) -> Probe:
    with tempfile.TemporaryDirectory() as folder:
        return bench_run(Path(folder) / "run.json", *load, "ttft=60", number)


def _steps(records: Sequence[Record]) -> int:
    times = sorted(chunk.at for record in records for chunk in record.chunks)
    return 1 + sum(later - earlier > APART_S for earlier, later in pairwise(times))


def _server_cpu() -> float:
    """Seconds so far, its instances' not counted."""
    with urllib.request.urlopen(f"{URL}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    name = "process_cpu_seconds_total "
    return float(next(line for line in lines if line.startswith(name)).removeprefix(name))


def text(cost: HostCpu) -> str:
    """As the option takes it."""
    return ",".join(f"{1e3 * seconds:.2g}" for seconds in cost)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a quarter of the requests: a trial")
    options = parser.parse_args()
    part = 4 if options.quick else 1
    loads = [load._replace(requests=max(2, load.requests // part)) for load in LOADS]
    out.print(f"--host-cpu {text(measure(loads))}", highlight=False)


if __name__ == "__main__":
    main()
