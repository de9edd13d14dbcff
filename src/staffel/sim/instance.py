"""A simulated instance: the live one's loop around an EngineCore, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from staffel.control.engine import EngineCore
from staffel.control.messages import (
    LEASE_NS,
    Batch,
    BatchResult,
    EngineConfig,
    Hello,
    KvRegion,
    Order,
    Report,
    read_blocks,
)
from staffel.latency.model import Phase, Work, phase_of
from staffel.sim.clock import Clock
from staffel.sim.cores import Idleness
from staffel.sim.executor import CountingExecutor
from staffel.sim.models import InstanceModel, LinkModel, Shell
from staffel.sim.outcome import Use


class SimulatedInstance:
    """Takes orders, schedules, executes for as long as the model says, commits, reports."""

    def __init__(
        self,
        name: str,
        model: InstanceModel,
        link: LinkModel,
        shell: Shell,
        clock: Clock,
        send: Callable[[Report], None],
        *,
        prefix_cache: bool,
    ) -> None:
        self.name = name
        self.model = model
        self.use = Use(name=name, role=model.role, devices=model.devices)
        self.neighbours: Sequence[SimulatedInstance] = ()
        """Those on the same host."""
        self.computing: Phase | None = None
        self._link = link
        self._step_s = shell.step_s
        self._clock = clock
        self._send = send
        self._core = EngineCore(_config(name, model, link, prefix_cache=prefix_cache))
        self._executor = CountingExecutor(model.max_sequences)
        self._inbox: list[Order] = []
        self._stages = [0] * model.pp
        """When each pipeline stage has done what was handed to it."""
        self._flying = 0
        self._idleness = Idleness()
        self._taken_s = 0.0
        """That others took from its cores during its step, which isn't longer by it yet."""

    @property
    def hello(self) -> Hello:
        config = self._core.config
        region = KvRegion(
            kind="simulated", pid=0, fd=0, size=0, slots=config.max_sequences,
            num_blocks=config.num_blocks, layers=0, block_size=config.block_size, kv_heads=0,
            k_width=0, v_width=0, dtype="",
        )  # fmt: skip
        return Hello(
            instance=self.name,
            incarnation=config.incarnation,
            role=config.role,
            region=region,
            prefix_cache=config.prefix_cache,
        )

    @property
    def working(self) -> bool:
        return self._flying > 0

    def idleness(self, now: int) -> float:
        """Share of its recent time."""
        return self._idleness.share(now)

    def give(self, seconds: float) -> None:
        """Let somebody else have its cores for so long, in the midst of a step."""
        self._taken_s += seconds

    def deliver(self, order: Order) -> None:
        """A message arrives. It is read between two steps."""
        self._inbox.append(order)
        if not self._flying:
            self._turn(None)

    def _turn(self, _: None) -> None:
        """Once around the loop, if the first stage and a place in flight are free."""
        now = self._clock.now
        if self._flying == self.model.pp or self._stages[0] > now:
            return
        for order in self._inbox:
            self._core.receive(order, now)
        self._inbox.clear()
        batch = self._core.schedule(now)
        if batch is not None:
            self._execute(batch)
        elif not self._flying:
            self.computing = None
            self._idleness.note(now, idle=True)
            self._report()

    def _execute(self, batch: Batch) -> None:
        result, work = self._executor.execute(batch)
        seconds = self._seconds(batch, work)
        self.use.count(work, seconds)
        end = self._pass_stages(round(seconds * 1e9 / self.model.pp))
        self._idleness.note(self._clock.now, idle=False)
        self._flying += 1
        self._clock.at(end, self._finish, (batch.id, result))
        if self.model.pp > 1:
            self._clock.at(self._stages[0], self._turn)

    def _pass_stages(self, part: int) -> int:
        """Each stage takes the batch when it is there and the stage is free; when the last ends."""
        at = self._clock.now
        for stage, free in enumerate(self._stages):
            at = self._stages[stage] = max(at, free) + part
        return at

    def _finish(self, done: tuple[int, BatchResult]) -> None:
        if self._taken_s:
            self._put_off(done)
            return
        self._flying -= 1
        self._core.commit(*done, self._clock.now)
        self._report()
        self._turn(None)

    def _put_off(self, done: tuple[int, BatchResult]) -> None:
        """The step isn't done yet: others had the cores for a while."""
        taken, self._taken_s = self._taken_s, 0.0
        self.use.busy_s += taken
        self._clock.at(self._clock.now + round(taken * 1e9), self._finish, done)

    def _report(self) -> None:
        report = self._core.report()
        if report is not None:
            self.use.load = report.load
            self._send(report)

    # ---- what a step costs

    def _seconds(self, batch: Batch, work: Work) -> float:
        if not (work.prompts or work.decodes or batch.reads):
            return 0.0  # slots that are left, nothing else
        computing = self._compute_seconds(work)
        reading = self._read_seconds(batch) if batch.reads else 0.0
        together = max(computing, reading) if self._link.beside else computing + reading
        return together + self._step_s

    def _compute_seconds(self, work: Work) -> float:
        if not (work.prompts or work.decodes):
            return 0.0
        self.computing = phase_of(work)
        alone = self.model.latency.step_seconds(work)
        return alone + self._slowdown(self.computing, alone) if self.model.slowdown else alone

    def _slowdown(self, phase: Phase, alone: float) -> float:
        """Seconds, by what each neighbour computes when the step starts: their steps follow each
        other."""
        slowdown = self.model.slowdown.get(phase, {})
        longer = 0.0
        for neighbour in self.neighbours:
            if neighbour.computing is not None:
                other = "decode" if neighbour.computing == "decode" else "prefill"
                if other in slowdown:
                    longer += slowdown[other].seconds(alone)
        return longer

    def _read_seconds(self, batch: Batch) -> float:
        size = self.model.block_size
        return sum(self._link.seconds(len(chunk.blocks) * size) for chunk in batch.reads)


def _config(
    name: str, model: InstanceModel, link: LinkModel, *, prefix_cache: bool
) -> EngineConfig:
    return EngineConfig(
        instance=name,
        incarnation=1,
        role=model.role,
        policy=model.policy,
        num_blocks=model.kv_tokens // model.block_size,
        block_size=model.block_size,
        max_sequences=model.max_sequences,
        chunk_tokens=model.chunk_tokens,
        read_blocks=_read_blocks(model, link),
        lease_ns=LEASE_NS,
        prefix_cache=prefix_cache,
        stages=model.pp,
    )


def _read_blocks(model: InstanceModel, link: LinkModel) -> int:
    """Beside a step: what the link carries while one sequence decodes, the shortest of steps."""
    bytes_per_block = link.kv_bytes_per_token * model.block_size
    if not link.beside:
        return read_blocks(bytes_per_block)
    shortest = model.latency.step_seconds(Work.decode(1, 1))
    return max(1, int(shortest * link.bytes_per_second / bytes_per_block))
