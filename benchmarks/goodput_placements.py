"""Goodput of three placements of the default model on two cores, under one SLO.

    python benchmarks/goodput_placements.py [--out FOLDER] [--minutes M] [--workload NAME]
                                            [--placement NAME]

Each placement is served by `staffel serve` with two instances of one core each, and measured by
`staffel bench goodput`, with two workloads: one where prompts weigh more, one where outputs do.
The SLO is made once, as a multiple of what an unloaded 1P1D does on the first workload; a folder
that has one keeps it. The load generator shares the two cores with the server, as in any test on
one machine.

Writes one result per search, and a page with the comparison for each workload. With --placement the
other placements' results are those that the folder has.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from staffel.bench.results import Probe, Result

# Relative, so that the results name no folder of this machine.
RESULTS = Path(os.path.relpath(Path(__file__).parent / "results"))
PORT = 8123
URL = f"http://127.0.0.1:{PORT}"
PLACEMENTS = {
    "1P1D": ["--prefill", "1", "--decode", "1"],
    "2C-chunked": ["--colocated", "2", "--policy", "chunked"],
    "2C-prefill-first": ["--colocated", "2", "--policy", "prefill-first"],
}
WORKLOADS = {
    "prompts": "lognormal:150,0.5,60,0.5",
    "outputs": "lognormal:40,0.5,200,0.5",
}
FIRST_RATES = {"prompts": "2", "outputs": "1.5"}
SLO = "auto:ttft=5x,tpot=3x"


def staffel(*words: str) -> list[str]:
    return [sys.executable, "-m", "staffel", *words]


def bench_run(file: Path, workload: str, rate: float, requests: int, slo: str, seed: int) -> Probe:
    """One run against the server that is there, with its result in `file`. That requests were sent
    late is no failure here: the result says so."""
    file.unlink(missing_ok=True)
    subprocess.run(
        staffel(
            "bench", "run", URL, "--rate", str(rate), "--requests", str(requests),
            "--workload", workload, "--slo", slo, "--seed", str(seed), "--quiet", "-o", str(file),
        ),
        check=False,
    )  # fmt: skip
    return Result.load(file).probes[0]


@contextmanager
def serving(options: list[str], length: str = "1024") -> Iterator[None]:
    """A server that is ready, and gone afterwards; `length` is its context."""
    _check_port()
    command = staffel("serve", "--port", str(PORT), "--max-model-len", length, *options)
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_ready(server)
        yield
    finally:
        server.terminate()
        server.wait()


def _check_port() -> None:
    """Whoever listens there already would be measured in the server's place."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", PORT))
        except OSError:
            raise SystemExit(f"port {PORT} is taken; end what listens there") from None


def _wait_ready(server: subprocess.Popen[bytes]) -> None:
    for _ in range(240):
        if server.poll() is not None:
            raise SystemExit(f"the server ended with status {server.returncode}")
        try:
            with urllib.request.urlopen(f"{URL}/ready"):
                return
        except OSError:
            time.sleep(0.5)
    raise SystemExit("the server was not ready within two minutes")


def result_file(out: Path, workload: str, placement: str) -> Path:
    return out / f"{workload}-{placement}.json.gz"


def measure(out: Path, workload: str, placement: str, minutes: float) -> None:
    """One search."""
    result = result_file(out, workload, placement)
    with serving(PLACEMENTS[placement]):
        subprocess.run(
            staffel(
                "bench", "goodput", URL, "--workload", WORKLOADS[workload],
                "--slo", str(out / "slo.json"), "--budget", str(minutes), "--devices", "2",
                "--first-rate", FIRST_RATES[workload],
                "--label", placement, "--output", str(result),
            ),
            check=True,
        )  # fmt: skip


def make_slo(file: Path) -> None:
    with serving(PLACEMENTS["1P1D"]):
        subprocess.run(
            staffel(
                "bench", "slo", URL, "--workload", WORKLOADS["prompts"], "--slo", SLO,
                "--output", str(file),
            ),
            check=True,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS / "goodput")
    parser.add_argument("--minutes", type=float, default=15, help="for each search")
    parser.add_argument("--workload", choices=WORKLOADS, help="this one only")
    parser.add_argument("--placement", choices=PLACEMENTS, help="this one only")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if not (options.out / "slo.json").exists():
        make_slo(options.out / "slo.json")
    for workload in [options.workload] if options.workload else WORKLOADS:
        for name in [options.placement] if options.placement else PLACEMENTS:
            measure(options.out, workload, name, options.minutes)
        compared = [str(result_file(options.out, workload, name)) for name in PLACEMENTS]
        subprocess.run(
            staffel("bench", "compare", *compared, "--report", str(options.out / workload)),
            check=True,
        )


if __name__ == "__main__":
    main()
