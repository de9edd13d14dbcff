"""Where the time of a prompt's step goes: products, attention, what lies between, and the rest.

    python benchmarks/step_split.py [--tokens 512] [--repeats 15]

Steps run in this process, on one core, with a clock around every call of a kernel; medians over the
repeats. The rest is the model's own code: sums, reshaping, the interpreter. Writes
results/step_split.json.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from staffel.config import ModelSpec
from staffel.kernels import attention, elementwise, library, linear
from staffel.model import hub
from staffel.model.executor import Executor
from staffel.model.shapes import BatchShape
from staffel.model.station import Stage
from staffel.terminal import print_table

FILE = Path(__file__).parent / "results" / "step_split.json"
WARM_UP = 3


class Clock:
    """Seconds in each kind of kernel, since it was last read."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def around(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            started = perf_counter()
            found = function(*args)
            self._seconds[kind] += perf_counter() - started
            return found

        return timed

    def read(self) -> dict[str, float]:
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        return seconds


def watch_kernels() -> Clock:
    """Before a model is loaded: it takes the kernels as they are then."""
    clock = Clock()
    linear.linear = clock.around("products", linear.linear)
    attend = clock.around("attention", attention.kernel())
    attention.kernel = lambda: attend
    for kind, name in (("norms", "rms_norm"), ("gates", "gated"), ("rotary", "rotary")):
        setattr(elementwise, name, clock.around(kind, getattr(elementwise, name)))
    return clock


def split(stage: Stage, clock: Clock, tokens: int, repeats: int) -> dict[str, float]:
    """Median milliseconds of each kind, and of the whole step."""
    shape = BatchShape(prompts=1, new=tokens)
    found = []
    for _ in range(WARM_UP + repeats):
        clock.read()
        whole = stage.time_step(shape)
        parts = clock.read()
        found.append({**parts, "the rest": whole - sum(parts.values()), "whole step": whole})
    return {kind: 1e3 * median(run[kind] for run in found[WARM_UP:]) for kind in found[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    if library.level() is None:
        sys.exit("there are no kernels here to be timed")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    clock = watch_kernels()
    path = hub.resolve(None, print)
    spec = ModelSpec.load(path, name="model", max_model_len=max(1024, options.tokens + 2))
    executor = Executor(spec, kv_bytes=1 << 28, threads=1, decodes=False)
    found = split(Stage(executor, spec.vocab_size), clock, options.tokens, options.repeats)
    print_table([["part", "ms"], *([kind, f"{ms:.1f}"] for kind, ms in found.items())])
    result = {"tokens": options.tokens, "kernels": library.level(), "ms": found}
    FILE.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
