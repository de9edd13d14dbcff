"""How well the goodput search does, against servers whose goodput is known, in virtual time.

    python benchmarks/search_quality.py [--searches N] [--case NAME ...]

Prints the table of docs/goodput.md, a row for each case: how often the interval held the truth, the
standard deviation of the estimate and half the interval's width (median), both as shares of the
truth, how many probes a search took and how many requests. Where TTFT alone has a bound the truth
is exact (M/D/1); where TPOT has one too it comes from one long simulation. A search without an
answer holds no truth, and is counted.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from staffel.bench.search import GoodputSearch  # noqa: E402
from staffel.config import SLO  # noqa: E402
from tests.bench.virtual import Server, poisson, run_probe, run_search  # noqa: E402


class Case(NamedTuple):
    server: Server
    slo: SLO
    target: float = 0.9
    minutes: float = 15
    precision: float = 0.05
    first: float = 1.0
    """Requests per second that a search begins with."""


QUEUE = Server()
CROWDED = Server(crowding=0.05)
SLOW = Server(service=0.8)
CASES = {
    "0.9, fixed TPOT, ±5 % asked": Case(QUEUE, SLO(ttft=0.16)),
    "0.9, fixed TPOT, ±2 % asked, 30 min": Case(
        QUEUE, SLO(ttft=0.16), minutes=30, precision=0.02
    ),
    "0.9, TPOT grows with load": Case(CROWDED, SLO(ttft=0.16, tpot=0.04)),
    "0.99, fixed TPOT": Case(QUEUE, SLO(ttft=0.16), target=0.99),
    "0.99, TPOT grows with load": Case(CROWDED, SLO(ttft=0.16, tpot=0.04), target=0.99),
    "0.9, 20 times slower, 60 min": Case(SLOW, SLO(ttft=3.2), minutes=60),
    "0.9, 20 times slower": Case(SLOW, SLO(ttft=3.2)),
    "0.9, prompts of 170 ms, 60 tokens": Case(
        Server(service=0.17, tpot=0.025, tokens=60, crowding=0.06), SLO(ttft=0.76, tpot=0.065),
        first=2.0,
    ),
    "0.9, the same, 10 min": Case(
        Server(service=0.17, tpot=0.025, tokens=60, crowding=0.06), SLO(ttft=0.76, tpot=0.065),
        minutes=10, first=2.0,
    ),
    "0.9, answers of 200 tokens": Case(
        Server(service=0.045, tpot=0.022, tokens=200, crowding=0.05), SLO(ttft=0.76, tpot=0.065)
    ),
    "0.9, the same, 10 minutes": Case(
        Server(service=0.045, tpot=0.022, tokens=200, crowding=0.05), SLO(ttft=0.76, tpot=0.065),
        minutes=10,
    ),
}  # fmt: skip
_LONG = 40_000
"""Requests of the simulation that the truth is taken from, at each rate."""
_WARM = 1_000


@cache
def truth(case: Case) -> float:
    if case.slo.tpot is None:
        return case.server.goodput(case.slo, case.target)
    low, high = 0.01, 100.0
    while high / low > 1.002:
        rate = (low * high) ** 0.5
        good = _attainment(case, rate) >= case.target
        low, high = (rate, high) if good else (low, rate)
    return low


def _attainment(case: Case, rate: float) -> float:
    arrivals = poisson(rate, _LONG / rate, np.random.default_rng(5))
    records = case.server.records(arrivals)[_WARM:]
    return float(np.mean([not record.missed(case.slo) for record in records]))


class Found(NamedTuple):
    """By one search; shares of the truth, NaN where there is no answer."""

    value: float
    low: float
    high: float
    probes: int
    requests: int


def search(name: str, seed: int) -> Found:
    case, rng = CASES[name], np.random.default_rng(seed)
    outcome = run_search(
        GoodputSearch(
            case.target, case.slo, case.first, 60 * case.minutes, precision=case.precision
        ),
        lambda plan: run_probe(case.server, plan, case.slo, case.target, rng),
    )
    requests = sum(len(probe.records) for probe in outcome.probes)
    goodput, right = outcome.goodput, truth(case)
    shares = (
        (np.nan,) * 3 if goodput is None
        else (goodput.value / right, goodput.low / right, goodput.high / right)
    )  # fmt: skip
    return Found(*shares, len(outcome.probes), requests)


def row(name: str, found: list[Found]) -> list[str]:
    table = np.array(found, float)
    value, low, high, probes, requests = table.T
    held = np.sum((low <= 1) & (high >= 1))
    return [
        name, f"{truth(CASES[name]):.3g}", str(len(found)), str(int(np.isnan(value).sum())),
        f"{held / len(found):.0%}", f"{np.nanmedian(value) - 1:+.1%}", f"{np.nanstd(value):.1%}",
        f"{np.nanmedian((high - low) / 2):.1%}", f"{np.median(probes):.0f}",
        f"{np.median(requests):,.0f}",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--searches", type=int, default=60)
    parser.add_argument("--case", nargs="*", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    head = ["target, server", "truth, req/s", "searches", "without answer", "interval holds it",
            "off by (median)", "error", "half the width", "probes", "requests"]  # fmt: skip
    _print(head)
    _print(["---"] * len(head))
    with ProcessPoolExecutor() as pool:
        for name in options.case:
            names, seeds = [name] * options.searches, range(options.searches)
            _print(row(name, list(pool.map(search, names, seeds))))


def _print(cells: list[str]) -> None:
    """A row of the table, once it is known."""
    print("|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
