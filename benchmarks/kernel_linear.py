"""Linear layers on one core: the packed kernels, torch, and the least that the machine allows.

    python benchmarks/kernel_linear.py
    STAFFEL_KERNELS=avx2 python benchmarks/kernel_linear.py --rows 1 8 32 --shapes 576x3072

The limit of a product is the larger of its arithmetic over the rate of sgemm and its fp32 weights'
bytes over the rate of reading. Reading is the best of ten sums of 512 MB; sgemm is the better of
torch (2048³) and of the kernels on the same sizes, since torch doesn't use all that every CPU has.
Weights come from memory: each call takes the next of many copies. With --hot it is one and the same
matrix, as far as caches hold it.

All candidates take turns on the same copies, the best of some turns counts, and the clock is the
thread's own: other processes can still take bandwidth, but no time. `STAFFEL_KERNELS=avx2` holds
MKL to AVX2 too. The last line is the worst of ours over the limit, up to 32 rows and beyond.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

if os.environ.get("STAFFEL_KERNELS") == "avx2":
    os.environ["MKL_ENABLE_INSTRUCTIONS"] = "AVX2"

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from staffel.kernels import library, linear

SHAPES = ["576x960", "576x576", "576x3072", "1536x576", "576x49152"]
ROWS = [1, 2, 4, 8, 16, 32, 128, 512]
ROTATED = 320_000_000
"""Bytes of weights that a candidate goes through before it meets the first again."""
READ = 512 * 2**20
SQUARE = 2048
TURNS = 5
WORK = 2e9
"""Operations after which a turn ends, though not all copies have been met."""

Call = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True, slots=True)
class Rates:
    """Floating-point operations and bytes a second, of one core."""

    sgemm: float
    read: float

    def limit(self, rows: int, n: int, k: int) -> float:
        """Seconds of a product at the least."""
        return max(2 * rows * n * k / self.sgemm, 4 * n * k / self.read)


@dataclass(frozen=True, slots=True)
class Cell:
    rows: int
    n: int
    k: int
    limit: float
    seconds: dict[str, float]

    def over_limit(self, name: str) -> float:
        return self.seconds[name] / self.limit


def main() -> None:
    arguments = parse()
    torch.set_num_threads(1)
    rates = measure_rates()
    print(
        f"{library.level()}: one core does {rates.sgemm / 1e9:.0f} GFLOP/s of sgemm"
        f" and reads {rates.read / 1e9:.1f} GB/s"
    )
    cells = [
        cell
        for shape in arguments.shapes
        for cell in measure(shape, arguments.rows, arguments.hot, rates)
    ]
    Console(width=110).print(table(cells))
    few, many = (worst(cells, lambda rows, few=few: (rows <= 32) is few) for few in (True, False))
    print(f"worst_over_limit_to_32_rows={few} beyond={many}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="inputs x outputs")
    parser.add_argument("--hot", action="store_true", help="one copy of the weights")
    return parser.parse_args()


def measure_rates() -> Rates:
    memory, square = torch.ones(READ // 4), torch.randn(SQUARE, SQUARE)
    packed = linear.pack(square)
    sgemm = min(
        best(lambda: torch.mm(square, square), 5),
        best(lambda: linear.linear(square, packed, SQUARE), 5),
    )
    return Rates(sgemm=2 * SQUARE**3 / sgemm, read=READ / best(memory.sum, 10))


def measure(shape: str, rows: list[int], hot: bool, rates: Rates) -> list[Cell]:
    """The cells of one shape."""
    k, n = map(int, shape.split("x"))
    copies = 1 if hot else max(1, ROTATED // (4 * n * k))
    candidates = prepare(torch.randn(n, k), copies)
    return [
        Cell(t, n, k, rates.limit(t, n, k), race(candidates, torch.randn(t, k), n, copies))
        for t in rows
    ]


def prepare(weight: Tensor, copies: int) -> dict[str, Call]:
    """The candidates: each computes x times the transpose of its i-th copy."""
    n = len(weight)
    plain = [weight.clone() for _ in range(copies)]
    packed = [linear.pack(weight) for _ in range(copies)]
    first = linear.quantize(weight)
    small = [
        linear.Int8Weight(first.packed.clone(), first.scales, first.n, first.k)
        for _ in range(copies)
    ]
    return {
        "ours": lambda x, i: linear.linear(x, packed[i], n),
        "torch": lambda x, i: torch.mm(x, plain[i].T),
        "int8": lambda x, i: linear.linear_int8(x, small[i]),
    }


def race(candidates: dict[str, Call], x: Tensor, n: int, copies: int) -> dict[str, float]:
    """Seconds of one call of each candidate."""
    calls = max(1, min(copies, int(WORK / (2 * x.numel() * n))))
    if copies == 1:
        calls = max(1, int(WORK / (20 * x.numel() * n)))
    times = {name: [] for name in candidates}
    for turn in range(TURNS):
        for name, call in candidates.items():
            order = [(turn * calls + i) % copies for i in range(calls)]
            times[name].append(best(lambda c=call, o=order: [c(x, i) for i in o], 1) / calls)
    return {name: min(seconds) for name, seconds in times.items()}


def best(call: Callable[[], object], times: int) -> float:
    """Seconds of this thread, the least of some calls."""
    least = float("inf")
    for _ in range(times):
        start = time.thread_time()
        call()
        least = min(least, time.thread_time() - start)
    return least


def worst(cells: list[Cell], wanted: Callable[[int], bool]) -> str:
    found = [cell.over_limit("ours") for cell in cells if wanted(cell.rows)]
    return f"{max(found):.2f}" if found else "none"


def table(cells: list[Cell]) -> Table:
    out = Table(
        "k → n", "rows", "limit µs", "ours µs", "over limit", "torch", "int8 µs", "over fp32"
    )
    for cell in cells:
        ours, int8 = cell.seconds["ours"], cell.seconds["int8"]
        out.add_row(
            f"{cell.k} → {cell.n}",
            str(cell.rows),
            f"{cell.limit * 1e6:.0f}",
            f"{ours * 1e6:.0f}",
            f"{cell.over_limit('ours'):.2f}x",
            f"{cell.over_limit('torch'):.2f}x",
            f"{int8 * 1e6:.0f}",
            f"{ours / int8:.2f}x",
        )
    return out


if __name__ == "__main__":
    main()
