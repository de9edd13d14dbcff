"""Another client measures the same endpoint: do its TTFT, TPOT and ITL agree with ours?

    python -m venv /tmp/peer && /tmp/peer/bin/pip install aiperf
    python benchmarks/peer_clients.py --peer-bin /tmp/peer/bin/aiperf --tokenizer FOLDER
    python benchmarks/peer_clients.py --peer-bin … --tokenizer … --url URL --model NAME

FOLDER is a model's: both clients make their prompts of its tokens. Without --url the endpoint is a
fake server whose times are known: TTFT 200 ms, TPOT and ITL 20 ms. The two clients take turns
(ours, theirs, ours, theirs …), with the same constant rate, number of requests and lengths, and a
new connection for each request. What is compared is the median over all requests of a run, and the
ratio is the median over the pairs of runs:

* TTFT: AIPerf's starts when it sends, ours at the scheduled arrival. The ratio takes ours from the
  sending too, where both mean the same; `ttft_scheduled_ms` is the one that `staffel bench` shows.
* TPOT: AIPerf's "inter token latency", with the server's counts; the same where the first chunk
  holds one token.
* ITL: AIPerf's "inter chunk latency"; the same where each chunk holds one token.

`prompt_tokens` and `output_tokens` of a run are the server's counts; the fake server counts a
prompt's characters. Writes benchmarks/results/peer_clients.json; the last line says the outcome.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import staffel  # noqa: E402
from staffel.bench.results import Result  # noqa: E402
from tests.bench.fake_reply import Behaviour  # noqa: E402
from tests.bench.fake_server import FakeServer  # noqa: E402

FAKE = Behaviour(prefill=0.2, tpot=0.02)
FAKE_NAME = "fake server: TTFT 200 ms, TPOT 20 ms"
FILE = ROOT / "benchmarks" / "results" / "peer_clients.json"
MEASURES = ("ttft", "tpot", "itl")
PEER_NAMES = {
    "ttft_ms": "time_to_first_token",
    "tpot_ms": "inter_token_latency",
    "itl_ms": "inter_chunk_latency",
    "prompt_tokens": "input_sequence_length",
    "output_tokens": "output_sequence_length",
}
"""AIPerf's names of our measures."""

Figures = dict[str, float]


def ours(options: argparse.Namespace, url: str, seed: int, folder: Path) -> Figures:
    """Medians of one run of `staffel bench run`, in ms."""
    file = folder / f"ours-{seed}.json"
    command = [
        *(sys.executable, "-m", "staffel", "bench", "run", url, "--quiet"),
        *("--workload", f"fixed:{options.input},{options.output}", "--arrivals", "constant"),
        *("--rate", str(options.rate), "--requests", str(options.requests)),
        *("--slo", "ttft=60", "--seed", str(seed), "-o", str(file)),
        *("--tokenizer", str(options.tokenizer)),
    ]
    # A run in which the generator was late exits with 1 and yet writes its result.
    said = _run(command, good=(0, 1))
    if not file.exists():
        sys.exit(f"staffel bench run wrote no result:\n{said}")
    return _our_figures(Result.load(file))


def _our_figures(result: Result) -> Figures:
    probe = result.probes[0]
    good = [record for record in probe.records if record.error is None]
    if not good:
        sys.exit(f"every request of staffel bench run failed: {probe.records[0].error}")
    return {
        "requests": len(good),
        "failed": len(probe.records) - len(good),
        "ttft_ms": 1e3 * median(record.ttft - record.lateness for record in good),
        "ttft_scheduled_ms": 1e3 * median(record.ttft for record in good),
        "tpot_ms": 1e3 * median(record.tpot for record in good),
        "itl_ms": 1e3 * median(gap for record in good for gap in record.gaps()),
        "prompt_tokens": median(record.prompt_tokens for record in good),
        "output_tokens": median(record.tokens for record in good),
        "lateness_p99_ms": 1e3 * probe.generator.lateness_p99,
    }


def theirs(options: argparse.Namespace, url: str, seed: int, folder: Path) -> Figures:
    """Medians of one run of AIPerf, in ms."""
    artifacts = folder / f"theirs-{seed}"
    command = [
        *(str(options.peer_bin), "profile", "--url", url, "--model", options.model),
        *("--endpoint-type", "completions", "--streaming", "--use-legacy-max-tokens"),
        *("--tokenizer", str(options.tokenizer)),
        *("--use-server-token-count", "--extra-inputs", "ignore_eos:true"),
        *("--isl", str(options.input), "--isl-stddev", "0"),
        *("--osl", str(options.output), "--osl-stddev", "0"),
        *("--request-rate", str(options.rate), "--arrival-pattern", "constant"),
        *("--request-count", str(options.requests)),
        *("--num-dataset-entries", str(options.requests), "--random-seed", str(seed)),
        *("--connection-reuse-strategy", "never", "--ui", "none"),
        *("--artifact-dir", str(artifacts)),
    ]
    said = _run(command, good=(0,))
    file = artifacts / "profile_export_aiperf.json"
    if not file.exists():
        sys.exit(f"AIPerf wrote no {file.name}:\n{said[-3000:]}")
    return _peer_figures(json.loads(file.read_text()))


def _peer_figures(export: dict[str, Any]) -> Figures:
    missing = [name for name in PEER_NAMES.values() if not export.get(name)]
    if missing:
        sys.exit(f"AIPerf's result has no {', '.join(missing)}: did its requests fail?")
    return {
        "requests": export["request_count"]["avg"],
        "failed": (export.get("error_request_count") or {"avg": 0})["avg"],
        **{name: export[theirs]["p50"] for name, theirs in PEER_NAMES.items()},
    }


def _run(command: list[str], good: tuple[int, ...]) -> str:
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    )
    if done.returncode not in good:
        sys.exit(f"{Path(command[0]).name} ended with {done.returncode}:\n{done.stdout[-3000:]}")
    return done.stdout


def peer_version(program: Path) -> str:
    """Ends the script where `program` isn't AIPerf."""
    advice = "install it in an environment of its own: pip install aiperf"
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        sys.exit(f"--peer-bin: {program} can't be run ({error}); {advice}")
    found = re.search(r"\d+\.\d+\S*", done.stdout)
    if program.name != "aiperf" or done.returncode or not found:
        sys.exit(f"--peer-bin: {program} is not AIPerf's program `aiperf`; {advice}")
    return found.group()


@contextlib.contextmanager
def fake_endpoint() -> Iterator[str]:
    """URL of a fake server in a process of its own."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.Process(target=_serve, args=(there,))
    process.start()
    try:
        yield here.recv()
    finally:
        here.send("stop")
        process.join()


def _serve(pipe: Connection) -> None:
    async def serve() -> None:
        async with FakeServer(FAKE) as server:
            pipe.send(server.url)
            await asyncio.get_running_loop().run_in_executor(None, pipe.recv)

    asyncio.run(serve())


def compare(options: argparse.Namespace, url: str) -> dict[str, Any]:
    """Takes turns, and sets the two side by side."""
    load = os.getloadavg()[0]
    pairs = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(1, options.pairs + 1):  # new prompts: no cache helps the second
            pair = {
                "ours": ours(options, url, seed, Path(folder)),
                "theirs": theirs(options, url, seed, Path(folder)),
            }
            print(json.dumps(pair), flush=True)
            pairs.append(pair)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "rate": options.rate,
        "requests": options.requests,
        "prompt_tokens": options.input,
        "output_tokens": options.output,
        "cores": len(os.sched_getaffinity(0)),
        "load_average_before": load,
        **{f"{name}_ratio": _ratio(pairs, f"{name}_ms") for name in MEASURES},
        "pairs": pairs,
    }


def _ratio(pairs: list[dict[str, Figures]], name: str) -> float:
    """Ours over theirs: the median over the pairs."""
    return median(pair["ours"][name] / pair["theirs"][name] for pair in pairs)


def save(label: str, found: dict[str, Any]) -> None:
    """Into the file, beside what it says of other endpoints."""
    results = json.loads(FILE.read_text()) if FILE.exists() else {}
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps({**results, label: found}, indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer-bin", type=Path, required=True, help="the program `aiperf`")
    parser.add_argument("--tokenizer", type=Path, required=True, help="the model's folder")
    parser.add_argument("--url", help="endpoint, without /v1; default: a fake server")
    parser.add_argument("--model", default="fake", help="its name at the endpoint; for --url")
    parser.add_argument("--label", help="the endpoint's name in the results; default: the model's")
    parser.add_argument("--rate", type=float, default=2.0, help="requests per second")
    parser.add_argument("--requests", type=int, default=60, help="of each run")
    parser.add_argument("--input", type=int, default=60, help="prompt tokens")
    parser.add_argument("--output", type=int, default=20, help="output tokens, 2 or more")
    parser.add_argument("--pairs", type=int, default=3, help="runs of each client")
    options = parser.parse_args()
    if not (options.tokenizer / "tokenizer.json").is_file():
        parser.error(f"--tokenizer: {options.tokenizer} has no tokenizer.json")
    if options.url and options.model == "fake":
        parser.error("--url needs --model, the endpoint's name for it: see its /v1/models")
    if options.output < 2 or options.pairs < 1 or options.requests < 1 or options.rate <= 0:
        parser.error("--output must be 2 or more, --pairs and --requests 1, and --rate above 0")
    return options


def main() -> None:
    options = _options()
    version = peer_version(options.peer_bin)
    endpoint = contextlib.nullcontext(options.url) if options.url else fake_endpoint()
    with endpoint as url:
        found = compare(options, url)
    versions = {
        "staffel": staffel.__version__,
        "python": platform.python_version(),
        "aiperf": version,
    }
    save(
        options.label or (options.model if options.url else FAKE_NAME),
        {"versions": versions, **found},
    )
    print(" ".join(f"{name}_ratio={found[f'{name}_ratio']:.4f}" for name in MEASURES))


if __name__ == "__main__":
    main()
