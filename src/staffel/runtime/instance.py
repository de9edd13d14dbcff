"""An instance: an EngineCore, an executor, and the loop that runs them."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from staffel.config import ConfigError, InstanceSpec, ModelSpec
from staffel.control.engine import EngineCore
from staffel.control.journal import record
from staffel.control.messages import (
    Attach,
    Batch,
    BatchResult,
    Detach,
    EngineConfig,
    Hello,
    KvRegion,
    Order,
    Unable,
    read_blocks,
)
from staffel.runtime.journal_file import JournalFile
from staffel.runtime.links import InstanceLink
from staffel.runtime.logs import set_up_logging
from staffel.runtime.pulse import Pulse

log = logging.getLogger("staffel.instance")

_IDLE_POLL_MS = 500
_GRAMMAR_POLL_MS = 2
"""While a grammar is being compiled."""


class InstanceJob(msgspec.Struct, frozen=True, kw_only=True):
    """All that an instance needs to know to start."""

    name: str
    incarnation: int
    endpoint: str
    model: ModelSpec
    spec: InstanceSpec
    threads: int
    cores: tuple[int, ...] | None
    """Cores to be pinned to; None: any."""
    gpu_turn: tuple[int, int]
    """Its number among the instances on GPUs, and how many those are."""
    lease_ns: int
    beat_s: float
    """Between two signs of life; 0: none."""
    journal: str | None
    """A file to which the core's journal is appended."""
    log_level: str = "INFO"


class Executor(Protocol):
    """What computes batches (`staffel.model.executor.Executor`)."""

    region: KvRegion

    def attach(self, instance: str, incarnation: int, region: KvRegion) -> None: ...
    def detach(self, instance: str, incarnation: int) -> None: ...
    def want_grammars(self, texts: Sequence[str]) -> None: ...
    def grammars_arrived(self) -> list[tuple[str, str | None]]: ...
    def execute(self, batch: Batch) -> BatchResult: ...
    def close(self) -> None: ...


class Instance:
    """The shell around one EngineCore: takes orders, runs steps, reports."""

    def __init__(self, core: EngineCore, executor: Executor, link: InstanceLink) -> None:
        self._core = core
        self._executor = executor
        self._link = link
        self._checked_idle = False
        self.turns = 0
        """How often the loop has gone round."""

    def run(self) -> None:
        """Serve until the lifeline is cut."""
        busy = preparing = False
        while True:
            self.turns += 1
            pause = _GRAMMAR_POLL_MS if preparing else _IDLE_POLL_MS
            orders = self._link.receive(0 if busy else pause)
            if orders is None:
                return
            for order in orders:
                self._take(order)
            preparing = self._prepare_grammars(preparing)
            busy = self._step()

    def _prepare_grammars(self, preparing: bool) -> bool:
        """Have those compiled that sequences wait for; whether some are being compiled now."""
        wanted = self._core.unprepared
        if not (wanted or preparing):
            return False
        for grammar, problem in self._executor.grammars_arrived():
            self._core.prepared(grammar, problem, time.monotonic_ns())
        wanted = self._core.unprepared
        self._executor.want_grammars(wanted)
        return bool(wanted)

    def _take(self, order: Order) -> None:
        if order.incarnation != self._core.config.incarnation:
            return
        for command in order.commands:
            if isinstance(command, Attach):
                self._executor.attach(command.instance, command.incarnation, command.region)
            elif isinstance(command, Detach):
                self._executor.detach(command.instance, command.incarnation)
        self._core.receive(order, time.monotonic_ns())

    def _step(self) -> bool:
        """Schedule, execute, commit, report. False: there was nothing to do."""
        batch = self._core.schedule(time.monotonic_ns())
        if batch is not None:
            result = self._executor.execute(batch)
            self._core.commit(batch.id, result, time.monotonic_ns())
        report = self._core.report()
        if report is not None:
            self._link.send(report)
        self._check_books(busy=batch is not None)
        return batch is not None

    def _check_books(self, *, busy: bool) -> None:
        if busy or not self._core.idle:
            self._checked_idle = False
        elif not self._checked_idle:
            self._checked_idle = True
            problem = self._core.integrity()
            if problem is not None:
                log.error("%s: %s", self._core.config.instance, problem)


def run_instance(job: InstanceJob, lifeline: int) -> None:
    """Load the model, say hello and serve, until `lifeline` reads end-of-file."""
    link = InstanceLink(job.endpoint, job.name, lifeline)
    executor: Executor | None = None
    pulse: Pulse | None = None
    journal = JournalFile(Path(job.journal)) if job.journal is not None else None
    try:
        executor = _make_executor(job)
        core = EngineCore(_engine_config(job, executor.region))
        if journal is not None:
            record(core, "engine", f"{job.name}/{job.incarnation}", journal.append)
        link.send(
            Hello(
                instance=job.name,
                incarnation=job.incarnation,
                role=job.spec.role,
                region=executor.region,
                prefix_cache=job.spec.prefix_cache,
            )
        )
        instance = Instance(core, executor, link)
        if job.beat_s:
            pulse = Pulse(
                job.endpoint, job.name, job.incarnation, job.beat_s, lambda: instance.turns
            )
        instance.run()
    except ConfigError as error:
        link.send(Unable(job.name, job.incarnation, str(error)))
    finally:
        if pulse is not None:
            pulse.close()
        if executor is not None:
            executor.close()
        if journal is not None:
            journal.close()
        link.close()


def _make_executor(job: InstanceJob) -> Executor:
    # Imported here: whoever only starts instances does without torch.
    from staffel.model.executor import Executor as ModelExecutor
    from staffel.model.executor import GpuUse

    return ModelExecutor(
        job.model,
        dtype=job.spec.dtype,
        quantization=job.spec.quantization,
        device=job.spec.device,
        threads=job.threads,
        decodes=job.spec.role != "prefill",
        kv_bytes=job.spec.kv_bytes,
        chunk_tokens=job.spec.chunk_tokens,
        gpu=GpuUse(*job.gpu_turn, utilization=job.spec.gpu_share, graphs=job.spec.cuda_graphs),
        block_size=job.spec.block_size,
        max_sequences=job.spec.max_sequences,
    )


def _engine_config(job: InstanceJob, region: KvRegion) -> EngineConfig:
    return EngineConfig(
        instance=job.name,
        incarnation=job.incarnation,
        role=job.spec.role,
        policy=job.spec.policy or "chunked",
        num_blocks=region.num_blocks,
        block_size=region.block_size,
        max_sequences=job.spec.max_sequences,
        chunk_tokens=job.spec.chunk_tokens,
        read_blocks=read_blocks(region.size // region.num_blocks),
        lease_ns=job.lease_ns,
        prefix_cache=job.spec.prefix_cache,
    )


def main() -> None:
    """Entry of an instance process: the job on the first line of stdin, then the lifeline."""
    # A service manager signals all processes of a service; only the lifeline ends an instance,
    # so that running requests can finish.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    line = bytearray()
    while not line.endswith(b"\n"):  # unbuffered, so that nothing is read beyond the line
        byte = os.read(0, 1)
        if not byte:
            return
        line += byte
    job = msgspec.json.decode(line, type=InstanceJob)
    set_up_logging(job.log_level)
    if job.cores is not None:
        os.sched_setaffinity(0, job.cores)
    try:
        run_instance(job, lifeline=0)
    except Exception:
        log.exception("%s died", job.name)
        sys.exit(1)


if __name__ == "__main__":
    main()
