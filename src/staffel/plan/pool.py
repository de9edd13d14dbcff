"""Trials by the simulator, in as many processes as there are cores.

Equal trials have equal answers, in any order and in any process: lengths and gaps come from one
seed, and all rates and placements see the same ones (common random numbers).
"""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import islice
from statistics import median
from types import TracebackType

from msgspec.structs import replace

from staffel.bench.records import Record
from staffel.bench.steady import TURNOVERS, residence
from staffel.bench.workload import Lengths, Style, Workload
from staffel.config import SLO, ConfigError
from staffel.plan.trials import Seen, Trial
from staffel.sim.goodput import arrivals_at, needs_token_times, simulated_goodput
from staffel.sim.models import Shell
from staffel.sim.outcome import Outcome
from staffel.sim.system import simulate

SAMPLE = 10_000
"""Requests that are drawn of a workload at most."""
LEAST_REQUESTS = 400
PRECISION = 0.04
FIRST, SURELY = 0.7, 1.3
"""The first rate to try, and the highest, as shares of what can't be exceeded (bounds are of mean
lengths, and several instances pool their queues)."""


@dataclass(frozen=True)
class Task:
    """What all trials have in common."""

    lengths: tuple[Lengths, ...]
    attainment: float
    seed: int
    requests: int
    """For each instance."""
    shell: Shell
    least: int = LEAST_REQUESTS
    """Fewer aren't simulated, however few instances there are."""

    def goodput(self, trial: Trial) -> float:
        if trial.high <= 0:
            return 0.0  # by its bound, without a simulation
        return simulated_goodput(
            trial.instances,
            trial.link,
            self.asked(trial),
            trial.slo,
            self.attainment,
            seed=self.seed,
            requests=self.requests_of(trial),
            shell=self.shell,
            precision=PRECISION,
            start=FIRST * trial.high,
            high=SURELY * trial.high,
        ).rate

    def at_rate(self, trial: Trial, rate: float) -> Seen:
        records = self._settled(trial, rate)
        seconds = len(records) / rate
        paces = [record.tpot for record in records if record.tpot]
        missed = [record.missed(trial.slo) for record in records]
        return Seen(
            rate=rate,
            attainment=sum(not each for each in missed) / len(records),
            ttft_met=sum("ttft" not in each for each in missed) / len(records),
            tokens_per_second_per_user=1 / median(paces) if paces else math.inf,
            output_tokens_per_second=sum(record.tokens for record in records) / seconds,
            slo_scale=slo_scale(records, trial.slo, self.attainment),
        )

    def _settled(self, trial: Trial, rate: float) -> list[Record]:
        """What counts of a run that is long beside the time that a request takes."""
        requests = self.requests_of(trial)
        outcome = self._run(trial, rate, requests)
        wanted = math.ceil(1.2 * TURNOVERS * rate * residence(outcome.records))
        if wanted > requests:
            outcome = self._run(trial, rate, min(wanted, len(self.lengths)))
        return outcome.probe(trial.slo, rate).counted() or outcome.records

    def _run(self, trial: Trial, rate: float, requests: int) -> Outcome:
        arrivals = arrivals_at(self.asked(trial), rate, requests, self.seed)
        return simulate(
            trial.instances,
            trial.link,
            arrivals,
            shell=self.shell,
            token_times=needs_token_times(trial.slo),
        )

    def asked(self, trial: Trial) -> Workload:
        if trial.first_token_only:
            changed = (replace(each, output_tokens=1) for each in self.lengths)
        elif trial.output_factor != 1:
            changed = (_longer(each, trial.output_factor) for each in self.lengths)
        else:
            changed = iter(self.lengths)
        return Drawn(tuple(changed))

    def requests_of(self, trial: Trial) -> int:
        """Prompts alone are quickly simulated."""
        wanted = 2 * self.least
        if not trial.first_token_only:
            instances = sum(instance.devices > 0 for instance in trial.instances)
            wanted = max(self.least, self.requests * instances)
        return min(wanted, len(self.lengths))


def slo_scale(records: Sequence[Record], slo: SLO, attainment: float) -> float:
    """The smallest factor on all bounds that `attainment` of the requests would still meet."""
    needed = sorted(_scale(record, slo) for record in records)
    return needed[min(len(needed) - 1, math.ceil(attainment * len(needed)) - 1)]


def _scale(record: Record, slo: SLO) -> float:
    if {"failed", "unfinished"} & set(record.missed(slo)):
        return math.inf
    measures = ((getattr(record, name), bound) for name, bound in slo.bounds().items())
    return max((value / bound for value, bound in measures if value is not None), default=0.0)


def _longer(lengths: Lengths, factor: float) -> Lengths:
    return replace(lengths, output_tokens=max(1, round(factor * lengths.output_tokens)))


@dataclass(frozen=True)
class Drawn:
    """Lengths that are drawn already. Satisfies `Workload`."""

    drawn: tuple[Lengths, ...]
    name: str = "drawn"
    style: Style = "prose"
    notes: tuple[str, ...] = ()

    def lengths(self, seed: int) -> Iterator[Lengths]:
        return iter(self.drawn)

    def arrivals(self) -> list[float] | None:
        return None


def draw(workload: Workload, seed: int) -> tuple[Lengths, ...]:
    """Raises ConfigError where the workload is too short to plan by."""
    drawn = tuple(islice(workload.lengths(seed), SAMPLE))
    if len(drawn) < LEAST_REQUESTS:
        raise ConfigError(
            f"--workload: {workload.name} has {len(drawn)} requests; "
            f"{LEAST_REQUESTS} are the least to plan by"
        )
    return drawn


class Pool:
    """A `Simulator` in processes of its own. Close it, or use it with `with`."""

    def __init__(self, task: Task, processes: int | None = None) -> None:
        self.lengths = task.lengths
        self.width = processes or len(os.sched_getaffinity(0))
        # Nothing of the parent's threads or open files is wanted in the children.
        self._processes = ProcessPoolExecutor(
            self.width,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_set,
            initargs=(task,),
        )

    def goodputs(self, trials: Sequence[Trial]) -> list[float]:
        return list(self._processes.map(_goodput, trials))

    def at_rates(self, asked: Sequence[tuple[Trial, float]]) -> list[Seen]:
        return list(self._processes.map(_at_rate, *zip(*asked, strict=True)))

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._processes.shutdown(cancel_futures=True)


_task: Task | None = None
"""Of this process: sent once, not with each trial."""


def _set(task: Task) -> None:
    global _task
    _task = task


def _goodput(trial: Trial) -> float:
    assert _task is not None
    return _task.goodput(trial)


def _at_rate(trial: Trial, rate: float) -> Seen:
    assert _task is not None
    return _task.at_rate(trial, rate)
