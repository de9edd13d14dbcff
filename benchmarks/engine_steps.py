"""Step times of the executor, each beside the least that the machine allows.

    python benchmarks/engine_steps.py [--quick]
    python benchmarks/engine_steps.py --peer http://127.0.0.1:8200

Batches as an engine gives them go to an executor in this process, pinned to `--threads` cores:
prompts of some lengths, and decoding at some batch sizes and contexts. All cells take turns, over
and over, so that a drift of the machine meets them alike; medians are reported. The limit of a
step (`step_limits.py`) comes from the arithmetic and the bytes of the model, and from the rates of
sgemm and of reading memory, each the best of ten measurements spread over the same turns. All of it
happens twice: with the other cores idle, and with one of them reading memory.

With --peer the same cells are then measured end to end, at a server of ours with one instance and
at that OpenAI endpoint, turn by turn (`step_peer.py`). The peer must serve the same weights on as
many cores, with room for 32 sequences of 1024 tokens.

To see what a processor without AVX-512 does on one that has it, set STAFFEL_KERNELS=avx2 and
ONEDNN_MAX_CPU_ISA=AVX2.

The last line is the worst ratio to the limit with the other cores idle, prompts from 128 tokens on.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import step_peer
import torch
from rich.console import Console
from rich.table import Table
from step_limits import Cell, Machine, ModelCosts, count, reading

from staffel.config import ModelSpec
from staffel.control.messages import Batch, Enter, ReadChunk, Row
from staffel.control.request import SamplingParams
from staffel.kernels import library
from staffel.model import hub
from staffel.model.executor import Executor

FILE = Path(__file__).parent / "results" / "engine_steps.json"
PREFILL = (32, 128, 512, 1024)
BATCHES = (1, 4, 8, 16, 32)
CONTEXTS = (64, 512)
CELLS = [
    *map(Cell.prefill, PREFILL),
    *(Cell.decode(batch, context) for context in CONTEXTS for batch in BATCHES),
]
COUNTED_FROM = 128
"""Shorter prompts don't count in the last line."""
RATES = 10
"""Times that the machine's rates are measured."""
BLOCK = 16
IDLE, READING = "other cores idle", "another core reads memory"


@dataclass(frozen=True)
class Effort:
    """How often everything is repeated."""

    turns: int
    steps: int
    """Decode steps of a cell in a turn."""
    peer_turns: int

    @property
    def rates_a_turn(self) -> int:
        return -(-RATES // self.turns)


FULL, QUICK = Effort(turns=5, steps=6, peer_turns=3), Effort(turns=1, steps=3, peer_turns=1)


class Engine:
    """Gives an executor the batches of cells, and times them.

    Each decoding sequence has a slot and blocks of its own, filled once; a prompt has the slot
    after them.
    """

    def __init__(self, executor: Executor, vocabulary: int, steps: int) -> None:
        self._executor = executor
        self._steps = steps
        self._ids = np.random.default_rng(0).integers(0, vocabulary, max(PREFILL) + 1).tolist()
        self._fill()

    def run(self, cell: Cell) -> list[float]:
        """Seconds of some steps."""
        return self._decode(cell) if cell.decodes else [self._prefill(cell.tokens)]

    def _prefill(self, tokens: int) -> float:
        slot = max(BATCHES)
        row = Row(slot, 0, tokens, True)
        return self._time(self._entering([slot], tokens, rows=[row]))

    def _decode(self, cell: Cell) -> list[float]:
        """After a first step that takes the sequences up."""
        slots = list(range(cell.sequences))
        self._time(self._entering(slots, cell.context + 1, decodes=slots))
        step = Batch(0, [], [], [], [], slots, [])
        return [self._time(step) for _ in range(self._steps)]

    def _fill(self) -> None:
        """KV of real tokens in all blocks: some values make arithmetic slow, or fast.

        Computed once; the executor copies it from its own cache, as from a peer's.
        """
        span = _span(self._steps)
        self._time(self._entering([0], span, rows=[Row(0, 0, span, False)]))
        copies = [
            ReadChunk("itself", 0, self._blocks(0), self._blocks(slot), None)
            for slot in range(1, max(BATCHES))
        ]
        self._executor.attach("itself", 0, self._executor.region)
        result = self._executor.execute(Batch(0, [], [], [], copies, [], []))
        self._executor.detach("itself", 0)
        if not all(result.reads):
            sys.exit("the executor can't read its own cache; is /proc there?")

    def _entering(
        self,
        slots: list[int],
        tokens: int,
        *,
        decodes: list[int] | None = None,
        rows: list[Row] | None = None,
    ) -> Batch:
        """A batch in which sequences of `tokens` ids take the place of those in the slots."""
        params = SamplingParams(max_tokens=max(PREFILL), temperature=0)
        enters = [Enter(slot, slot + 1, self._ids[:tokens], tokens, params) for slot in slots]
        grown = [(slot, self._blocks(slot)) for slot in slots]
        return Batch(0, slots, enters, grown, [], decodes or [], rows or [])

    def _blocks(self, slot: int) -> list[int]:
        each = _span(self._steps) // BLOCK
        size = max(PREFILL) // BLOCK if slot == max(BATCHES) else each
        return list(range(slot * each, slot * each + size))

    def _time(self, batch: Batch) -> float:
        begun = time.perf_counter()
        self._executor.execute(batch)
        return time.perf_counter() - begun


def _span(steps: int) -> int:
    """Tokens of KV of a decoding sequence, in whole blocks."""
    return -(-(max(CONTEXTS) + 1 + steps) // BLOCK) * BLOCK


@contextmanager
def engine(options: argparse.Namespace, model: ModelCosts) -> Iterator[Engine]:
    tokens = max(BATCHES) * _span(options.effort.steps) + max(PREFILL)
    spec = ModelSpec.load(options.path, name="model", max_model_len=max(PREFILL) + 1)
    executor = Executor(
        spec,
        kv_bytes=(tokens + BLOCK) * model.kv_bytes,
        block_size=BLOCK,
        max_sequences=max(BATCHES) + 1,
        quantization=options.quantization,
        threads=options.threads,
    )
    try:
        yield Engine(executor, spec.vocab_size, options.effort.steps)
    finally:
        executor.close()


# ---- measuring


def measure(steps: Engine, model: ModelCosts, effort: Effort) -> dict[str, Any]:
    """All cells and the machine's rates, turn by turn."""
    machine = Machine()
    seconds: dict[Cell, list[float]] = {cell: [] for cell in CELLS}
    for cell in CELLS:  # what is made at first use isn't timed
        steps.run(cell)
    for _ in range(effort.turns):
        machine.measure(effort.rates_a_turn)
        for cell in CELLS:
            seconds[cell] += steps.run(cell)
    return {
        "sgemm_gflops": machine.flops / 1e9,
        "read_gb_per_s": machine.bytes / 1e9,
        "cells": [_figures(cell, seconds[cell], machine.limit(model, cell)) for cell in CELLS],
    }


def _figures(cell: Cell, seconds: list[float], limit: float) -> dict[str, Any]:
    return {
        "cell": str(cell),
        "median_ms": 1e3 * median(seconds),
        "best_ms": 1e3 * min(seconds),
        "limit_ms": 1e3 * limit,
        "over_limit": median(seconds) / limit,
    }


def conditions(cores: list[int], threads: int) -> Iterator[tuple[str, Any]]:
    """What the other cores do meanwhile."""
    yield IDLE, nullcontext()
    if len(cores) > threads:
        yield READING, reading(cores[threads])
    else:
        print(f"no core is left beside --threads {threads}: none reads memory meanwhile")


def worst(cells: list[dict[str, Any]], *, decodes: bool) -> float:
    """The largest ratio to the limit."""
    counted = [cell for cell in CELLS if cell.decodes or cell.tokens >= COUNTED_FROM]
    names = {str(cell) for cell in counted if cell.decodes is decodes}
    return max(figures["over_limit"] for figures in cells if figures["cell"] in names)


# ---- reporting


def show(name: str, found: dict[str, Any]) -> None:
    rates = f"sgemm {found['sgemm_gflops']:.0f} GFLOP/s, reading {found['read_gb_per_s']:.1f} GB/s"
    _show_table(
        f"{name}: {rates}",
        {"median ms": "median_ms", "best ms": "best_ms", "limit ms": "limit_ms"},
        ("over limit", "over_limit"),
        found["cells"],
    )


def show_peer(found: dict[str, Any]) -> None:
    _show_table(
        "end to end: time to the first token of a prompt, time between tokens of a batch",
        {"ours ms": "ours_ms", "peer ms": "peer_ms"},
        ("peer over ours", "ratio"),
        found["cells"],
    )


def _show_table(
    title: str, times: dict[str, str], ratio: tuple[str, str], cells: list[dict[str, Any]]
) -> None:
    table = Table(title=title, title_justify="left")
    table.add_column("cell")
    for column in (*times, ratio[0]):
        table.add_column(column, justify="right")
    for cell in cells:
        figures = [f"{cell[key]:.1f}" for key in times.values()]
        table.add_row(cell["cell"], *figures, f"{cell[ratio[1]]:.2f}")
    Console(width=max(100, len(title))).print(table)


def about(options: argparse.Namespace) -> dict[str, Any]:
    """What the figures are of."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": options.path.name,
        "quantization": options.quantization,
        "kernels": library.level() or "off",
        "threads": options.threads,
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu(),
        "load_average_before": os.getloadavg()[0],
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("staffel", "torch", "transformers")},
        },
    }


def _cpu() -> str:
    """As Linux names it, with what its vectors can do."""
    text = Path("/proc/cpuinfo").read_text()
    names = [line.partition(": ")[2] for line in text.splitlines() if "model name" in line]
    widest = next((name for name in ("avx512f", "avx2") if name in text), "no AVX2")
    return f"{names[0] if names else platform.machine()}, {widest}"


# ---- the command


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a Hugging Face folder; default: the default model")
    parser.add_argument("--threads", type=int, default=1, help="of the executor")
    parser.add_argument("--quantization", choices=["int8"], help="of the weights")
    parser.add_argument("--peer", metavar="URL", help="an OpenAI endpoint to compare with")
    parser.add_argument("--json", type=Path, default=FILE, help="where the result goes")
    parser.add_argument("--quick", action="store_true", help="each cell once: a rough idea")
    options = parser.parse_args()
    if not 1 <= options.threads <= len(os.sched_getaffinity(0)):
        parser.error(f"--threads: from 1 to the {len(os.sched_getaffinity(0))} cores here")
    options.effort = QUICK if options.quick else FULL
    options.path = hub.resolve(options.model, lambda text: print(text, file=sys.stderr))
    return options


def measure_steps(options: argparse.Namespace) -> dict[str, Any]:
    """In this process, pinned as an instance would be."""
    weight_bytes = 1 if options.quantization else 4
    model = count(options.path, weight_bytes=weight_bytes, longest=max(PREFILL))
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[: options.threads])
    torch.set_num_threads(options.threads)
    found = {}
    with engine(options, model) as steps:
        for name, meanwhile in conditions(cores, options.threads):
            with meanwhile:
                found[name] = measure(steps, model, options.effort)
            show(name, found[name])
    os.sched_setaffinity(0, cores)
    return found


def main() -> None:
    options = _options()
    result = about(options) | {"steps": measure_steps(options)}
    if options.peer:
        result["peer"] = step_peer.compare(options, CELLS, options.effort.peer_turns)
        show_peer(result["peer"])
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    cells = result["steps"][IDLE]["cells"]
    print(
        f"decode_worst_over_limit={worst(cells, decodes=True):.2f} "
        f"prefill_worst_over_limit={worst(cells, decodes=False):.2f}"
    )


if __name__ == "__main__":
    main()
