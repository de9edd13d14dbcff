"""From a placement to the jobs of its instances: names, threads, cores."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from staffel.config import ConfigError, InstanceSpec, ModelSpec, Placement
from staffel.control.messages import LEASE_NS
from staffel.runtime.instance import InstanceJob

_BEAT_S = 1.0


def make_jobs(
    placement: Placement,
    model: ModelSpec,
    *,
    endpoint: str,
    hang_timeout: float = 0,
    journal: Path | None = None,
    log_level: str = "INFO",
) -> list[InstanceJob]:
    """One job for each instance of the placement, without an incarnation yet.

    `hang_timeout` is how many seconds without a sign of life are taken for a hang; 0: any.

    Raises:
        ConfigError: the placement is one that can be planned, and not served.
    """
    check_servable(placement)
    named = placement.each()
    threads, cores = share_cores([spec for _, spec in named], sorted(os.sched_getaffinity(0)))
    on_gpus = [name for name, spec in named if spec.device == "cuda"]
    return [
        InstanceJob(
            name=name,
            incarnation=0,
            endpoint=endpoint,
            model=model,
            spec=spec,
            threads=threads[number],
            cores=cores[number],
            gpu_turn=(on_gpus.index(name) if name in on_gpus else 0, len(on_gpus)),
            lease_ns=LEASE_NS,
            beat_s=min(_BEAT_S, hang_timeout / 4),
            journal=str(journal) if journal is not None else None,
            log_level=log_level,
        )
        for number, (name, spec) in enumerate(named)
    ]


def check_servable(placement: Placement) -> None:
    """Raise ConfigError, with the field's name, for what can be planned and not served."""
    if placement.hosts > 1:
        raise ConfigError(
            f"placement: hosts: {placement.hosts} can't be served yet, only planned and simulated; "
            "take hosts: 1 (`staffel plan --executable` plans what can be served)"
        )
    for spec in placement.instances:
        for field in ("tp", "pp"):
            size = getattr(spec.parallel, field)
            if size > 1:
                raise ConfigError(
                    f"placement: {spec.role}: parallel: {field}: {size} can't be served yet, only "
                    f"planned and simulated; take {field}: 1 (`staffel plan --executable` plans "
                    "what can be served)"
                )


def share_cores(
    specs: Sequence[InstanceSpec], cores: Sequence[int]
) -> tuple[list[int], list[tuple[int, ...] | None]]:
    """Threads of each instance, and the cores that it is pinned to.

    Threads that aren't given share the machine evenly. Instances get disjoint cores where there
    are enough for all; else none is pinned, as pinning would only pile them up.

    Raises:
        ConfigError: one instance is to have more threads than there are cores.
    """
    for spec in specs:
        if spec.threads is not None and spec.threads > len(cores):
            raise ConfigError(f"--threads: {spec.threads}, and there are {len(cores)} cores")
    even = max(1, len(cores) // len(specs))
    threads = [spec.threads or even for spec in specs]
    if sum(threads) > len(cores):
        return threads, [None] * len(specs)
    pinned: list[tuple[int, ...] | None] = []
    start = 0
    for count in threads:
        pinned.append(tuple(cores[start : start + count]))
        start += count
    return threads, pinned
