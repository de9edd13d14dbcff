"""How late the load generator is: 200 requests/s, 2,000 streams in flight at 5 tokens/s each.

    python benchmarks/bench_generator.py [--processes N] [--seconds S]

A fake server in a process of its own answers after 10 ms and sends a token every 200 ms. What the
client saw is compared with what the server wrote, token by token, on the clock that both share.
Writes benchmarks/results/generator.json; the last line says the outcome.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from staffel.bench.arrivals import Arrivals, arrival_times  # noqa: E402
from staffel.bench.load import run_load  # noqa: E402
from staffel.bench.preflight import discover, fetch  # noqa: E402
from staffel.bench.records import Record  # noqa: E402
from staffel.bench.results import Generator  # noqa: E402
from staffel.bench.sender import Counts  # noqa: E402
from staffel.bench.workload import Ask  # noqa: E402
from tests.bench.fake_server import separate_server  # noqa: E402

RATE = 200.0
TOKENS = 50
TPOT = 0.2
PREFILL = 0.001
"""The queue's service time: a load of 0.2, so that the wait is short and the times are exact."""


async def measure(processes: int | None, seconds: float) -> dict[str, object]:
    records: list[Record] = []
    seen: list[Counts] = []
    # A prompt of its own for each request, to find it again in the server's log.
    times = arrival_times(Arrivals("poisson"), RATE, seed=1)
    plan = ((at, Ask(f"request {index}", TOKENS, 2)) for index, at in enumerate(times))
    async with separate_server(prefill=PREFILL, tpot=TPOT) as url:
        endpoint = await discover(url)
        generator = await run_load(
            endpoint,
            plan,
            on_record=records.append,
            on_progress=seen.append,
            duration=seconds,
            processes=processes,
        )
        log = (await fetch(endpoint.address, _get_log(endpoint.address), 60)).content
    return summary(generator, records, seen, json.loads(log))


def _get_log(address: object) -> bytes:
    return msgspec.structs.replace(address, prefix="").request("GET", "/log", None)


def summary(
    generator: Generator, records: list[Record], seen: list[Counts], log: list[dict]
) -> dict[str, object]:
    served = {one["prompt"]: one for one in log}
    # The server's own clock at time 0 of the schedule isn't known to the client's records, so
    # spans are compared: from a request's first token to each later one.
    errors = sorted(
        abs(
            (chunk.at - record.chunks[0].at)
            - (at - served[f"request {record.index}"]["written"][0])
        )
        for record in records
        for chunk, at in _tokens(record, served[f"request {record.index}"]["written"])
    )
    return {
        "rate": RATE,
        "tokens_per_second_and_stream": 1 / TPOT,
        "requests": len(records),
        "failed": sum(record.error is not None for record in records),
        "streams": max(counts.in_flight for counts in seen),
        "sent_p99_ms": _p99([record.lateness for record in records]) * 1e3,
        "timestamp_error_p50_ms": errors[len(errors) // 2] * 1e3,
        "timestamp_error_p99_ms": _p99(errors) * 1e3,
        "cores": len(os.sched_getaffinity(0)),
        "generator": msgspec.to_builtins(generator),
    }


def _tokens(record: Record, written: list[float]) -> list[tuple]:
    """Each token's chunk and when the server wrote it: one token per event."""
    each = [chunk for chunk in record.chunks for _ in range(chunk.tokens)]
    return list(zip(each, written, strict=False))


def _p99(values: list[float]) -> float:
    return sorted(values)[-(-99 * len(values) // 100) - 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, help="senders; as run_load chooses by itself")
    parser.add_argument("--seconds", type=float, default=25.0, help="of sending")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    result = asyncio.run(measure(options.processes, options.seconds))
    result["load_average_before"] = load
    file = ROOT / "benchmarks" / "results" / "generator.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    generator = result["generator"]
    print(
        f"lateness_p99_ms={generator['lateness_p99'] * 1e3:.2f} streams={result['streams']} "
        f"cpu_share={generator['cpu_share']:.2f}"
    )


if __name__ == "__main__":
    main()
