"""EngineCore: one instance's decisions. What is computed, read, kept and freed, and when.

The shell calls `receive` for each order, `schedule` for a batch, `commit` with its result, and
`report` once a step. A sequence with a grammar waits until `prepared` says that the grammar can be
followed without delay. Several batches may be in flight, as long as they are executed and
committed in the order in which they were scheduled.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from staffel.control.blocks import BlockManager, extend_hashes
from staffel.control.messages import (
    Attach,
    Batch,
    BatchResult,
    Cancel,
    Command,
    Decoded,
    Detach,
    Ended,
    EngineConfig,
    Enter,
    Event,
    Failed,
    HandoffReady,
    Load,
    Order,
    Preempted,
    Prefilled,
    Pulled,
    PullFailed,
    PullKv,
    PullStarted,
    ReadChunk,
    Release,
    Renew,
    Report,
    Row,
    RowResult,
    Start,
    Tokens,
)
from staffel.control.request import FinishReason, Pull, Sequence
from staffel.control.scheduler import share

_IDLE_READ_FACTOR = 8
"""With nothing to disturb, a step reads this many times `read_blocks`, but no more: a
cancellation or a new request must not wait for a whole long sequence."""

Queue = OrderedDict[int, Sequence]


class _Flight:
    """A batch in flight: whose results are awaited, in the batch's order."""

    __slots__ = ("decodes", "id", "reads", "rows")

    def __init__(self, batch_id: int) -> None:
        self.id = batch_id
        self.reads: list[tuple[Sequence, bool]] = []
        """With whether it is the last of its pull."""
        self.decodes: list[Sequence] = []
        self.rows: list[tuple[Sequence, Row]] = []


class EngineCore:
    """The state machine of one incarnation of one instance."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.blocks = BlockManager(config.num_blocks, config.block_size)
        self._sequences: dict[int, Sequence] = {}
        self._unprepared: dict[str, dict[int, Sequence]] = {}
        """By the grammar that they wait for."""
        self._waiting: Queue = OrderedDict()
        """Prompts without blocks."""
        self._prefilling: Queue = OrderedDict()
        """Prompts with blocks, not yet scheduled to their end."""
        self._pull_waiting: Queue = OrderedDict()
        self._pulling: Queue = OrderedDict()
        self._decoding: Queue = OrderedDict()
        self._pinned: dict[int, int] = {}
        """Dispatches kept for a decode instance, with the end of their lease."""
        self._landing: list[Sequence] = []
        """Sequences that are over, but named by a batch in flight."""
        self._to_answer: set[int] = set()
        """Cancelled dispatches whose `Ended` is owed."""
        self._flights: dict[int, _Flight] = {}
        self._slots = list(range(config.max_sequences - 1, -1, -1))
        self._leaves: list[int] = []
        self._enters: list[Enter] = []
        self._grown: list[tuple[int, list[int]]] = []
        self._events: list[Event] = []
        self._last_order = 0
        self._last_batch = 0
        self._committed = 0
        self._last_report = 0
        self._last_load: Load | None = None
        self._preemptions = 0
        self._started = 0
        self._copied_bytes = 0
        self._copied_s = 0.0

    # ---- what the shell calls

    def receive(self, order: Order, now: int) -> None:
        """Take an order. Doubled ones, and those for another incarnation, are dropped."""
        if order.incarnation != self.config.incarnation or order.number <= self._last_order:
            return
        self._last_order = order.number
        for command in order.commands:
            if not isinstance(command, Attach | Detach):
                self._obey(command, now)

    def prepared(self, grammar: str, problem: str | None, now: int) -> None:
        """A grammar is ready for use; or it can't be followed, and `problem` says why."""
        for sequence in self._unprepared.pop(grammar, {}).values():
            if problem is None:
                self._enqueue(sequence)
            else:
                self._fail(sequence, problem)

    @property
    def unprepared(self) -> list[str]:
        """Grammars that sequences wait for."""
        return list(self._unprepared)

    def schedule(self, now: int) -> Batch | None:
        """The next step's work; None if there is none that can be done now."""
        self._expire_leases(now)
        flight = _Flight(self._last_batch + 1)
        reads = self._read_chunks(flight, now)
        self._compute(flight, now)
        if not (reads or flight.decodes or flight.rows or self._leaves):
            return None
        self._last_batch = flight.id
        self._flights[flight.id] = flight
        decodes = [sequence.slot for sequence in flight.decodes]
        rows = [row for _, row in flight.rows]
        batch = Batch(flight.id, self._leaves, self._enters, self._grown, reads, decodes, rows)
        self._leaves, self._enters, self._grown = [], [], []
        return batch

    def commit(self, batch_id: int, result: BatchResult, now: int) -> None:
        """Take back the result of the oldest batch in flight."""
        flight = self._flights.pop(batch_id)
        self._committed = batch_id
        self._copied_bytes += result.copied_bytes
        self._copied_s += result.copied_s
        for (sequence, last), good in zip(flight.reads, result.reads, strict=True):
            if not sequence.over:
                self._commit_read(sequence, last, good, now)
        if flight.decodes:
            self._commit_decodes(flight.decodes, result, now)
        for (sequence, row), row_result in zip(flight.rows, result.rows, strict=True):
            if not sequence.over:
                self._commit_row(sequence, row, row_result, now)
        if self._landing:
            self._land()

    def report(self) -> Report | None:
        """Everything new since the last report; None if there is nothing."""
        load = self._load()
        if not self._events and load == self._last_load:
            return None
        self._last_load = load
        self._last_report += 1
        events, self._events = self._events, []
        return Report(
            self.config.instance, self.config.incarnation, self._last_report, events, load
        )

    @property
    def idle(self) -> bool:
        """Nothing to do, nothing kept."""
        return not (self._sequences or self._flights or self._leaves or self._landing)

    def integrity(self) -> str | None:
        """What is wrong with an idle engine's books; None if nothing, or if it isn't idle."""
        if not self.idle:
            return None
        lost = self.blocks.num_blocks - self.blocks.available
        slots = self.config.max_sequences - len(self._slots)
        if not (lost or slots or self._pinned):
            return None
        return f"idle, but {lost} blocks, {slots} slots and {len(self._pinned)} pins are not free"

    # ---- orders

    def _obey(self, command: Command, now: int) -> None:
        match command:
            case Start():
                self._start(command, now)
            case PullKv():
                self._start_pull(command, now)
            case Release(dispatch=dispatch):
                self._release(dispatch)
            case Cancel(dispatch=dispatch):
                self._cancel(dispatch)
            case Renew(dispatches=dispatches):
                self._renew(dispatches, now)

    def _start(self, command: Start, now: int) -> None:
        sequence = Sequence(
            command.dispatch, command.request, command.emitted, handoff=command.handoff, now=now
        )
        self._arrive(sequence)

    def _start_pull(self, command: PullKv, now: int) -> None:
        sequence = Sequence(
            command.dispatch, command.request, command.emitted, handoff=False, now=now
        )
        sequence.pull = Pull(
            source=command.source,
            source_incarnation=command.source_incarnation,
            source_dispatch=command.source_dispatch,
            source_slot=command.source_slot,
            blocks=command.blocks,
            tokens=command.tokens,
        )
        self._arrive(sequence)

    def _arrive(self, sequence: Sequence) -> None:
        self._sequences[sequence.dispatch] = sequence
        self._started += 1
        grammar = sequence.request.params.grammar
        if grammar is None:
            self._enqueue(sequence)
        else:
            self._unprepared.setdefault(grammar, {})[sequence.dispatch] = sequence

    def _enqueue(self, sequence: Sequence) -> None:
        queue = self._waiting if sequence.pull is None else self._pull_waiting
        queue[sequence.dispatch] = sequence

    def _release(self, dispatch: int) -> None:
        if dispatch in self._pinned:
            self._let_go(self._sequences[dispatch])

    def _cancel(self, dispatch: int) -> None:
        self._to_answer.add(dispatch)
        sequence = self._sequences.get(dispatch)
        if sequence is None:
            self._answer(dispatch)
        else:
            self._let_go(sequence)

    def _renew(self, dispatches: Iterable[int], now: int) -> None:
        for dispatch in dispatches:
            if dispatch in self._pinned:
                del self._pinned[dispatch]  # so that the next to expire is the first
                self._pinned[dispatch] = now + self.config.lease_ns

    def _expire_leases(self, now: int) -> None:
        while self._pinned:
            dispatch, end = next(iter(self._pinned.items()))
            if end > now:
                break
            self._to_answer.add(dispatch)
            self._let_go(self._sequences[dispatch])

    # ---- scheduling: reads

    def _read_chunks(self, flight: _Flight, now: int) -> list[ReadChunk]:
        """Blocks to read in this step, from each pull's head, oldest pull first."""
        self._admit_pulls(now)
        budget = self.config.read_blocks
        if not self._decoding:
            budget *= _IDLE_READ_FACTOR
        chunks: list[ReadChunk] = []
        for sequence in self._pulling.values():
            if budget <= 0:
                break
            chunk = self._read_chunk(sequence, budget, flight)
            if chunk is not None:
                chunks.append(chunk)
                budget -= len(chunk.blocks)
        return chunks

    def _read_chunk(self, sequence: Sequence, budget: int, flight: _Flight) -> ReadChunk | None:
        pull = sequence.pull
        assert pull is not None
        start, end = pull.scheduled, min(pull.scheduled + budget, len(pull.blocks))
        if start == end:
            return None
        pull.scheduled = end
        last = end == len(pull.blocks)
        flight.reads.append((sequence, last))
        sequence.last_batch = flight.id
        return ReadChunk(
            pull.source,
            pull.source_incarnation,
            pull.blocks[start:end],
            sequence.blocks[start:end],
            (pull.source_slot, pull.source_dispatch) if last else None,
        )

    def _admit_pulls(self, now: int) -> None:
        while self._pull_waiting:
            sequence = next(iter(self._pull_waiting.values()))
            pull = sequence.pull
            assert pull is not None
            if next(iter(self._waiting), sequence.dispatch) < sequence.dispatch:
                break  # a prompt has waited for longer
            # One block at least is read, so that every pull is confirmed.
            if not self._admit(sequence, (pull.tokens - 1) // self.config.block_size):
                break
            pull.scheduled = sequence.cached_tokens // self.config.block_size
            sequence.first_scheduled = now
            self._pulling[sequence.dispatch] = self._pull_waiting.pop(sequence.dispatch)
            self._events.append(PullStarted(sequence.dispatch))

    # ---- scheduling: what is computed

    def _compute(self, flight: _Flight, now: int) -> None:
        ready = self._ready()
        allowed = share(self.config, len(ready), self._prompts_ready)
        if allowed.decode:
            self._decode(ready, flight)
        self._prompt_rows(flight, allowed.prompt_tokens, now)

    def _ready(self) -> list[Sequence]:
        """The running sequences that this step may decode: all, or this pipeline stage's share."""
        running = list(self._decoding.values())
        if self.config.stages == 1:
            return running
        part = -(-len(running) // self.config.stages)
        return [s for s in running if s.last_batch <= self._committed][:part]

    def _decode(self, ready: list[Sequence], flight: _Flight) -> None:
        for sequence in ready:
            if sequence.scheduled >= sequence.limit and not self._raise_limit(sequence):
                continue
            sequence.scheduled += 1
            sequence.last_batch = flight.id
            flight.decodes.append(sequence)

    def _raise_limit(self, sequence: Sequence) -> bool:
        """Room for a running sequence's next position. False: it gets none in this step."""
        if sequence.over or self._all_scheduled(sequence) or not self._grow(sequence):
            return False
        self._set_limit(sequence)
        return True

    def _set_limit(self, sequence: Sequence) -> None:
        room = len(sequence.blocks) * self.config.block_size
        sequence.limit = min(room, sequence.most_ids - 1)

    def _prompt_rows(self, flight: _Flight, budget: int, now: int) -> None:
        """First come, first served; the last prompt that fits is cut to the budget."""
        while budget > 0:
            sequence = self._next_prompt(now)
            if sequence is None:
                break
            left = len(sequence.ids) - sequence.scheduled
            count = min(budget, left)
            budget -= count
            sample = count == left and sequence.request.params.max_tokens > 0
            flight.rows.append((sequence, Row(sequence.slot, sequence.scheduled, count, sample)))
            sequence.scheduled += count
            sequence.last_batch = flight.id
            self._register(sequence, sequence.scheduled)
            if count == left:
                self._prompt_scheduled(sequence)

    def _next_prompt(self, now: int) -> Sequence | None:
        if self._prefilling:
            return next(iter(self._prefilling.values()))
        sequence = self._first_waiting()
        if sequence is None or not self._admit(sequence, self._cacheable(sequence)):
            return None
        sequence.first_scheduled = now
        self._prefilling[sequence.dispatch] = self._waiting.pop(sequence.dispatch)
        return sequence

    def _prompts_ready(self) -> bool:
        """Whether a step could compute prompts."""
        if self._prefilling:
            return True
        sequence = self._first_waiting()
        if sequence is None:
            return False
        return self._fits(sequence, self._matched(sequence, self._cacheable(sequence)))

    def _first_waiting(self) -> Sequence | None:
        """The oldest prompt without blocks; None if a pull has waited for longer."""
        sequence = next(iter(self._waiting.values()), None)
        if sequence is None or sequence.dispatch > next(
            iter(self._pull_waiting), sequence.dispatch
        ):
            return None
        return sequence

    def _prompt_scheduled(self, sequence: Sequence) -> None:
        del self._prefilling[sequence.dispatch]
        if not sequence.handoff and sequence.request.params.max_tokens > 0:
            self._start_decoding(sequence)

    def _start_decoding(self, sequence: Sequence) -> None:
        self._decoding[sequence.dispatch] = sequence
        self._set_limit(sequence)

    @staticmethod
    def _all_scheduled(sequence: Sequence) -> bool:
        """Whether batches in flight bring all the tokens that may still come."""
        return sequence.scheduled >= sequence.most_ids - 1

    # ---- memory

    def _cacheable(self, sequence: Sequence) -> int:
        """Most blocks of a prompt that may come from the cache: one token must be computed."""
        return (len(sequence.ids) - 1) // self.config.block_size

    def _matched(self, sequence: Sequence, blocks: int) -> list[int]:
        """Blocks of the cache that hold the head of the sequence, `blocks` at most."""
        if not self.config.prefix_cache or not sequence.request.use_cache:
            return []
        extend_hashes(sequence.hashes, sequence.ids, self.config.block_size, blocks)
        return self.blocks.match(sequence.hashes[:blocks])

    def _fits(self, sequence: Sequence, shared: list[int]) -> bool:
        """Room for the whole sequence, and for each running one to grow by a block."""
        fresh = self.blocks.blocks_for(len(sequence.ids)) - len(shared)
        return bool(self._slots) and self.blocks.can_take(shared, fresh + len(self._decoding))

    def _admit(self, sequence: Sequence, cacheable: int) -> bool:
        """Give a sequence its slot and blocks for all its ids, if they can be had."""
        shared = self._matched(sequence, cacheable)
        if not self._fits(sequence, shared):
            return False
        fresh = self.blocks.blocks_for(len(sequence.ids)) - len(shared)
        sequence.blocks = self.blocks.take(shared, fresh)
        cached = len(shared) * self.config.block_size
        sequence.scheduled = sequence.cached_tokens = cached
        self._take_slot(sequence)
        return True

    def _take_slot(self, sequence: Sequence) -> None:
        sequence.slot = self._slots.pop()
        self._enters.append(
            Enter(
                sequence.slot,
                sequence.dispatch,
                sequence.ids.copy(),
                sequence.prompt_len,
                sequence.request.params,
            )
        )
        self._grown.append((sequence.slot, sequence.blocks.copy()))

    def _grow(self, sequence: Sequence) -> bool:
        """One more block, at the cost of the newest sequence if need be."""
        while not self.blocks.available:
            if self._landing:
                return False  # blocks come back when the batches in flight land
            victim = self._newest()
            self._preempt(victim)
            if victim is sequence:
                return False
        self._register(sequence, min(sequence.scheduled, len(sequence.ids)))
        fresh = self.blocks.take([], 1)
        sequence.blocks += fresh
        self._grown.append((sequence.slot, fresh))
        return True

    def _newest(self) -> Sequence:
        held = (*self._decoding.values(), *self._prefilling.values(), *self._pulling.values())
        return max(held, key=lambda sequence: sequence.dispatch)

    def _preempt(self, sequence: Sequence) -> None:
        """A decode instance sends the sequence back through prefill; others recompute it."""
        self._preemptions += 1
        self._let_go(sequence)
        if self.config.role == "decode":
            self._events.append(Preempted(sequence.dispatch))
            return
        again = Sequence(
            sequence.dispatch,
            sequence.request,
            sequence.ids[sequence.prompt_len :],
            handoff=sequence.handoff,
            now=sequence.arrival,
        )
        self._sequences[again.dispatch] = again
        self._waiting[again.dispatch] = again
        self._waiting.move_to_end(again.dispatch, last=False)

    def _register(self, sequence: Sequence, tokens: int) -> None:
        """Offer the full blocks of the first `tokens` tokens to the prefix cache.

        For prompts as soon as they are scheduled: whoever shares the blocks computes after them.
        """
        if not self.config.prefix_cache:
            return
        blocks = tokens // self.config.block_size
        extend_hashes(sequence.hashes, sequence.ids, self.config.block_size, blocks)
        for i in range(sequence.registered, blocks):
            self.blocks.register(sequence.blocks[i], sequence.hashes[i])
        sequence.registered = max(sequence.registered, blocks)

    # ---- results

    def _land(self) -> None:
        """Free what is over and named by no batch in flight any more."""
        landed = [s for s in self._landing if s.last_batch <= self._committed]
        self._landing = [s for s in self._landing if s.last_batch > self._committed]
        for sequence in landed:
            self._free(sequence)

    def _commit_read(self, sequence: Sequence, last: bool, good: bool, now: int) -> None:
        if not good:
            self._let_go(sequence)
            self._events.append(PullFailed(sequence.dispatch))
        elif last:
            self._pulled(sequence, now)

    def _pulled(self, sequence: Sequence, now: int) -> None:
        pull = sequence.pull
        assert pull is not None
        sequence.pull = None
        sequence.prefilled = True
        sequence.scheduled = pull.tokens
        self._register(sequence, pull.tokens)
        del self._pulling[sequence.dispatch]
        self._start_decoding(sequence)
        self._events.append(Pulled(sequence.dispatch, now - sequence.first_scheduled))

    def _commit_decodes(self, decodes: list[Sequence], result: BatchResult, now: int) -> None:
        dispatches: list[int] = []
        indices: list[int] = []
        ids: list[int] = []
        details = result.details
        for place, (sequence, token) in enumerate(zip(decodes, result.tokens, strict=True)):
            if sequence.over:
                continue
            known = len(sequence.ids) + 1
            if known == sequence.most_ids or token in sequence.stop_ids or place in details:
                self._commit_token(sequence, details.get(place) or RowResult(token), now)
                continue
            sequence.ids.append(token)
            dispatches.append(sequence.dispatch)
            indices.append(known - 1 - sequence.prompt_len)
            ids.append(token)
        if ids:
            self._events.append(Decoded(dispatches, indices, ids))

    def _commit_row(self, sequence: Sequence, row: Row, result: RowResult, now: int) -> None:
        if result.prompt_logprobs:
            sequence.scores += result.prompt_logprobs
        if row.start + row.count < len(sequence.ids):
            return
        self._prompt_computed(sequence, now)
        if row.sample:
            self._commit_token(sequence, result, now)
        else:
            self._events.append(Tokens(sequence.dispatch, sequence.outputs, [], finish="length"))
            self._let_go(sequence)

    def _prompt_computed(self, sequence: Sequence, now: int) -> None:
        sequence.prefilled = True
        self._events.append(
            Prefilled(
                sequence.dispatch,
                sequence.cached_tokens,
                sequence.first_scheduled - sequence.arrival,
                now - sequence.first_scheduled,
                sequence.scores or None,
            )
        )

    def _commit_token(self, sequence: Sequence, result: RowResult, now: int) -> None:
        if result.failure is not None:
            self._fail(sequence, result.failure)
            return
        assert result.token is not None
        sequence.ids.append(result.token)
        finish = self._finish(sequence, result)
        logprobs = [result.logprobs] if result.logprobs is not None else None
        index = sequence.outputs - 1
        self._events.append(Tokens(sequence.dispatch, index, [result.token], logprobs, finish))
        if finish is not None:
            self._let_go(sequence)
        elif sequence.handoff:
            self._pin(sequence, now)

    @staticmethod
    def _finish(sequence: Sequence, result: RowResult) -> FinishReason | None:
        if result.grammar_ended or result.token in sequence.stop_ids:
            return "stop"
        return "length" if len(sequence.ids) >= sequence.most_ids else None

    def _pin(self, sequence: Sequence, now: int) -> None:
        self._pinned[sequence.dispatch] = now + self.config.lease_ns
        tokens = len(sequence.ids) - 1
        used = self.blocks.blocks_for(tokens)
        self._events.append(
            HandoffReady(sequence.dispatch, sequence.slot, sequence.blocks[:used], tokens)
        )

    # ---- endings

    def _fail(self, sequence: Sequence, problem: str) -> None:
        self._let_go(sequence)
        self._events.append(Failed(sequence.dispatch, problem))

    def _let_go(self, sequence: Sequence) -> None:
        """End a sequence here; what it holds is freed when no batch in flight names it."""
        if sequence.prefilled:
            self._register(sequence, len(sequence.ids) - 1)
        sequence.over = True
        sequence.limit = 0
        dispatch = sequence.dispatch
        del self._sequences[dispatch]
        self._pinned.pop(dispatch, None)
        for queue in (
            self._waiting, self._prefilling, self._pull_waiting, self._pulling, self._decoding,
        ):  # fmt: skip
            queue.pop(dispatch, None)
        self._stop_preparing(sequence)
        if sequence.last_batch > self._committed:
            self._landing.append(sequence)
        else:
            self._free(sequence)

    def _stop_preparing(self, sequence: Sequence) -> None:
        grammar = sequence.request.params.grammar
        if grammar is None or grammar not in self._unprepared:
            return
        waiting = self._unprepared[grammar]
        waiting.pop(sequence.dispatch, None)
        if not waiting:
            del self._unprepared[grammar]

    def _free(self, sequence: Sequence) -> None:
        self.blocks.release(sequence.blocks)
        sequence.blocks = []
        if sequence.slot >= 0:
            self._slots.append(sequence.slot)
            self._leaves.append(sequence.slot)
        self._answer(sequence.dispatch)

    def _answer(self, dispatch: int) -> None:
        """Say that nothing is left of a cancelled dispatch, once that is so."""
        if dispatch not in self._to_answer or dispatch in self._sequences:
            return
        if all(sequence.dispatch != dispatch for sequence in self._landing):
            self._to_answer.remove(dispatch)
            self._events.append(Ended(dispatch))

    def _load(self) -> Load:
        return Load(
            running=len(self._decoding) + len(self._prefilling) + len(self._pulling),
            waiting=len(self._waiting)
            + len(self._pull_waiting)
            + sum(map(len, self._unprepared.values())),
            pinned=len(self._pinned),
            free_blocks=self.blocks.free,
            cached_blocks=self.blocks.cached,
            total_blocks=self.blocks.num_blocks,
            preemptions=self._preemptions,
            started=self._started,
            copied_bytes=self._copied_bytes,
            copied_seconds=self._copied_s,
        )
