"""A whole system without tensors, sockets or sleeping: the real cores, and executors whose KV
cache holds token ids, so that every step can check that it reads what it should.

The next token is a function of all ids before it: whatever path a request takes, its output must
be `expected_output(request)`.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from itertools import count

import msgspec

from staffel.config import Policy, Role
from staffel.control.engine import EngineCore
from staffel.control.messages import (
    Attach,
    Batch,
    BatchResult,
    Delta,
    Deltas,
    EngineConfig,
    Failure,
    Hello,
    KvRegion,
    Order,
    Report,
    RouterConfig,
    Row,
    RowResult,
)
from staffel.control.request import Request, SamplingParams
from staffel.control.router import Actions, RouterCore

BLOCK = 4
VOCABULARY = 50
EOS = 0
SECOND = 10**9
LEASE = 30 * SECOND


def next_token(ids: list[int]) -> int:
    return random.Random(repr(ids)).randrange(VOCABULARY)


def request(
    name: str,
    prompt: list[int],
    max_tokens: int = 8,
    *,
    stop_ids: tuple[int, ...] = (EOS,),
    grammar: str | None = None,
) -> Request:
    params = SamplingParams(max_tokens=max_tokens, stop_ids=stop_ids, grammar=grammar)
    return Request(id=name, prompt=prompt, params=params)


def expected_output(asked: Request) -> list[int]:
    output: list[int] = []
    while len(output) < asked.params.max_tokens:
        output.append(next_token(asked.prompt + output))
        if output[-1] in asked.params.stop_ids:
            break
    return output


@dataclass
class Slot:
    dispatch: int
    ids: list[int]
    most_ids: int
    grammar: str | None = None
    blocks: list[int] = field(default_factory=list)


class CheckingExecutor:
    """Executes batches on a cache of ids, and fails where a row reads anything but its own."""

    def __init__(self, num_blocks: int) -> None:
        self.cells: list[list[int | None]] = [[None] * BLOCK for _ in range(num_blocks)]
        self.slots: dict[int, Slot] = {}
        self.peers: dict[tuple[str, int], CheckingExecutor] = {}
        self.failing_reads = 0
        self.failing_at = 0
        """A sequence with a grammar that has so many ids can't follow it any further; 0: none."""

    def execute(self, batch: Batch) -> BatchResult:
        for slot in batch.leaves:
            del self.slots[slot]
        for enter in batch.enters:
            assert enter.slot not in self.slots, "a slot was entered twice"
            most_ids = enter.prompt_len + enter.params.max_tokens
            self.slots[enter.slot] = Slot(
                enter.dispatch, enter.ids.copy(), most_ids, enter.params.grammar
            )
        for number, blocks in batch.grown:
            self.slots[number].blocks += blocks
        reads = [self._read(chunk) for chunk in batch.reads]
        decoded = [self._decode(slot) for slot in batch.decodes]
        tokens = [result.token for result in decoded]
        details = {place: r for place, r in enumerate(decoded) if r.failure is not None}
        return BatchResult([self._row(row) for row in batch.rows], reads, tokens, details)

    def _read(self, chunk) -> bool:
        peer = self.peers.get((chunk.source, chunk.source_incarnation))
        if peer is None:
            return False
        if self.failing_reads:
            self.failing_reads -= 1
            return False
        for source, block in zip(chunk.source_blocks, chunk.blocks, strict=True):
            self.cells[block] = peer.cells[source].copy()
        if chunk.confirm is None:
            return True
        slot, dispatch = chunk.confirm
        return slot in peer.slots and peer.slots[slot].dispatch == dispatch

    def _decode(self, slot: int) -> RowResult:
        return self._row(Row(slot, len(self.slots[slot].ids) - 1, 1, True))

    def _row(self, row: Row) -> RowResult:
        slot = self.slots[row.slot]
        assert row.count > 0, "a row computes nothing"
        end = row.start + row.count
        for position in range(row.start, end):
            self.cells[slot.blocks[position // BLOCK]][position % BLOCK] = slot.ids[position]
        held = [self.cells[slot.blocks[p // BLOCK]][p % BLOCK] for p in range(end)]
        assert held == slot.ids[:end], "a row read KV that is not its own"
        if not row.sample:
            return RowResult()
        token = next_token(slot.ids[:end])
        del slot.ids[end:]
        slot.ids.append(token)
        assert len(slot.ids) <= slot.most_ids, "a token was drawn beyond max_tokens"
        if slot.grammar is not None and len(slot.ids) == self.failing_at:
            return RowResult(token, failure="the grammar gave up")
        return RowResult(token)


class Worker:
    """An engine, its executor and the orders on their way to it."""

    def __init__(self, config: EngineConfig, depth: int) -> None:
        self.config = config
        self.depth = depth
        self.core = EngineCore(config)
        self.executor = CheckingExecutor(config.num_blocks)
        self.problems: dict[str, str | None] | None = None
        """What is found to be wrong with grammars; those that aren't in it are being prepared
        still. None: each is ready at once."""
        self.orders: deque[Order] = deque()
        self.flying: deque[Batch] = deque()

    @property
    def hello(self) -> Hello:
        config = self.config
        region = KvRegion(
            kind="shm", pid=0, fd=0, size=0, slots=config.max_sequences,
            num_blocks=config.num_blocks, layers=1, block_size=BLOCK, kv_heads=1,
            k_width=1, v_width=1, dtype="float32",
        )  # fmt: skip
        return Hello(
            instance=config.instance, incarnation=config.incarnation, role=config.role,
            region=region, prefix_cache=config.prefix_cache,
        )  # fmt: skip


class World:
    """Router and instances. `run` lets everything happen until nothing more does."""

    def __init__(self, *, depth: int = 1, **router: int) -> None:
        self.now = 0
        self.depth = depth
        settings = {"block_size": BLOCK, "lease_ns": LEASE, **router}
        self.router = RouterCore(RouterConfig(**settings))
        self.workers: dict[str, Worker] = {}
        self.dead: list[Worker] = []
        self.outputs: dict[str, list[int]] = {}
        self.finishes: dict[str, str] = {}
        self.deltas: list[Delta] = []
        self.failures: dict[str, Failure] = {}
        self.summaries: dict[str, object] = {}
        self.reports: list[Report] = []
        self._incarnations = count(1)

    # ---- instances

    def add(
        self,
        name: str,
        role: Role,
        *,
        blocks: int = 64,
        chunk: int = 16,
        sequences: int = 16,
        policy: Policy = "chunked",
        read_blocks: int = 2,
        stages: int = 1,
        prefix_cache: bool = True,
    ) -> Worker:
        config = EngineConfig(
            instance=name, incarnation=next(self._incarnations), role=role, policy=policy,
            num_blocks=blocks, block_size=BLOCK, max_sequences=sequences, chunk_tokens=chunk,
            read_blocks=read_blocks, lease_ns=LEASE, stages=stages,
            prefix_cache=prefix_cache,
        )  # fmt: skip
        worker = self.workers[name] = Worker(config, self.depth)
        self.act(self.router.join(worker.hello, self.now))
        return worker

    def kill(self, name: str) -> None:
        """It is gone; the router hears of it at once. Its memory stays mapped by its readers."""
        worker = self.workers.pop(name)
        self.dead.append(worker)
        self.act(self.router.lost(name, worker.config.incarnation, self.now))

    # ---- requests

    def submit(self, asked: Request) -> None:
        self.outputs[asked.id] = []
        self.act(self.router.submit(asked, self.now))

    def cancel(self, name: str) -> None:
        self.act(self.router.cancel(name, self.now))

    def act(self, actions: Actions) -> None:
        for name, order in actions.orders:
            # Through bytes and back, as on a real link.
            copy = msgspec.msgpack.decode(msgspec.msgpack.encode(order), type=Order)
            self.workers[name].orders.append(copy)
        for news in actions.news:
            for one in _each(news):
                self._hear(one)
        for summary in actions.summaries:
            self.summaries[summary.request] = summary

    def _hear(self, news: Delta | Failure) -> None:
        if isinstance(news, Failure):
            assert news.request not in self.failures
            self.failures[news.request] = news
            return
        output = self.outputs[news.request]
        assert news.index == len(output), "a token came twice or is missing"
        assert news.request not in self.finishes, "a token came after the end"
        output += news.ids
        self.deltas.append(news)
        if news.finish is not None:
            self.finishes[news.request] = news.finish

    # ---- time

    def deliver(self, worker: Worker) -> bool:
        """Hand over the orders that are on their way."""
        any_there = bool(worker.orders)
        while worker.orders:
            order = worker.orders.popleft()
            for command in order.commands:
                if isinstance(command, Attach):
                    source = self.workers.get(command.instance)
                    if source is not None:
                        key = (command.instance, command.incarnation)
                        worker.executor.peers[key] = source.executor
            worker.core.receive(order, self.now)
        for grammar in worker.core.unprepared:
            if worker.problems is None:
                worker.core.prepared(grammar, None, self.now)
            elif grammar in worker.problems:
                worker.core.prepared(grammar, worker.problems[grammar], self.now)
        return any_there

    def schedule(self, worker: Worker) -> bool:
        if len(worker.flying) >= worker.depth:
            return False
        batch = worker.core.schedule(self.now)
        if batch is None:
            return False
        worker.flying.append(batch)
        return True

    def commit(self, worker: Worker) -> bool:
        if not worker.flying:
            return False
        batch = worker.flying.popleft()
        worker.core.commit(batch.id, worker.executor.execute(batch), self.now)
        return True

    def report(self, worker: Worker) -> bool:
        report = worker.core.report()
        if report is None:
            return False
        self.reports.append(report)
        self.act(self.router.receive(report, self.now))
        return bool(report.events)

    def step(self, worker: Worker) -> bool:
        """One turn of an instance's loop: as many batches in flight as it may have."""
        self.now += 1000
        moved = self.deliver(worker)
        while self.schedule(worker):
            moved = True
        moved |= self.commit(worker)
        return self.report(worker) or moved

    def turn(self) -> bool:
        moved = False
        for worker in list(self.workers.values()):
            moved |= self.step(worker)
        return moved

    def run(self, turns: int = 10_000) -> None:
        for _ in range(turns):
            if not self.turn():
                return
        raise AssertionError("the system does not come to rest")

    def tick(self, seconds: float = 0) -> None:
        self.now += int(seconds * SECOND)
        self.act(self.router.tick(self.now))

    # ---- what must hold

    def assert_at_rest(self) -> None:
        """Nothing runs, and nothing is kept by anybody."""
        assert self.router.running == 0
        for worker in self.workers.values():
            assert worker.core.idle
            assert worker.core.integrity() is None
            assert worker.core.blocks.available == worker.config.num_blocks
            assert not worker.executor.slots

    def assert_served(self, *asked: Request) -> None:
        for one in asked:
            assert one.id not in self.failures, self.failures[one.id]
            assert self.outputs[one.id] == expected_output(one)
            assert one.id in self.finishes


def _each(news: Delta | Deltas | Failure) -> list[Delta | Failure]:
    if not isinstance(news, Deltas):
        return [news]
    columns = zip(news.requests, news.indices, news.ids, strict=True)
    return [Delta(request, index, [token]) for request, index, token in columns]


def disaggregated(prefill: int = 1, decode: int = 1, *, depth: int = 1, **settings) -> World:
    router = {
        key: settings.pop(key) for key in list(settings) if key in RouterConfig.__annotations__
    }
    world = World(depth=depth, **router)
    for number in range(prefill):
        world.add(f"prefill-{number}", "prefill", **settings)
    for number in range(decode):
        world.add(f"decode-{number}", "decode", **settings)
    return world
