"""How fast the simulator is: 60,000 chatbot requests through 2P1D on one core.

    python benchmarks/sim_speed.py [--requests N] [--rate R] [--profile]

OPT-13B on A100-80G by the sheet, a little below what the placement can serve. Every decision is
the server's own: router, schedulers, block managers. With --profile, says which functions took the
time (the run is about three times slower then). Writes benchmarks/results/sim_speed.json; the last
line is `requests_per_minute=N`.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import platform
import pstats
from pathlib import Path
from time import process_time

from staffel.bench.workloads import parse_workload
from staffel.config import SLO
from staffel.latency.hardware import hardware_named
from staffel.latency.roofline import RooflineModel
from staffel.latency.shape import shape_of
from staffel.sim.goodput import arrivals_at
from staffel.sim.models import InstanceModel, LinkModel
from staffel.sim.outcome import Outcome
from staffel.sim.system import simulate

SHEET, MODEL = "a100-80g", "opt-13b"
RATE = 5.0
SLO_ = SLO(ttft=0.25, tpot=0.1)


def two_prefill_one_decode() -> tuple[list[InstanceModel], LinkModel]:
    latency = RooflineModel(hardware_named(SHEET), shape_of(MODEL))
    roles = ("prefill", "prefill", "decode")
    instances = [
        InstanceModel(
            role=role, latency=latency, kv_tokens=latency.kv_tokens(), chunk_tokens=2048,
            max_sequences=256,
        )
        for role in roles
    ]  # fmt: skip
    link = LinkModel(
        latency.hardware.link_bytes_per_second, 0.0, latency.kv_bytes_per_token(), beside=True
    )
    return instances, link


def report(outcome: Outcome, seconds: float, rate: float) -> dict[str, object]:
    tokens = sum(record.tokens for record in outcome.records)
    decode = outcome.instances[-1]
    return {
        "requests": len(outcome.records),
        "rate": rate,
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "us_per_token": round(1e6 * seconds / tokens, 3),
        "mean_decode_batch": round(decode.decode_tokens / decode.steps, 1),
        "decode_busy": round(outcome.utilisation(decode), 3),
        "attainment": round(outcome.probe(SLO_, rate).attainment.value, 4),
        "python": platform.python_version(),
        "requests_per_minute": round(60 * len(outcome.records) / seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=60_000)
    parser.add_argument("--rate", type=float, default=RATE)
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    instances, link = two_prefill_one_decode()
    arrivals = arrivals_at(parse_workload("chatbot"), given.rate, given.requests, seed=0)
    profile = cProfile.Profile()
    if given.profile:
        profile.enable()
    begun = process_time()
    outcome = simulate(instances, link, arrivals)
    seconds = process_time() - begun
    profile.disable()
    if given.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(20)
    figures = report(outcome, seconds, given.rate)
    for name, value in figures.items():
        print(f"{name:20} {value}")
    if not given.profile:
        results = Path(__file__).parent / "results"
        (results / "sim_speed.json").write_text(json.dumps(figures, indent=2) + "\n")
    print(f"requests_per_minute={figures['requests_per_minute']}")


if __name__ == "__main__":
    main()
