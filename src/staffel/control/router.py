"""RouterCore: which instance gets a request, when KV is handed over, what happens on a loss.

The shell calls `submit`, `cancel`, `join`, `lost`, `receive` and `tick`; each returns `Actions`:
orders for instances and news for the API.

A job's life: queued -> prefill -> (claimed -> reading ->) decode. The handoff's states are those
of the design: pinned by the prefill instance when the job leaves `prefill`, then claimed, reading,
confirmed and released. Whatever goes wrong, the job either claims the pinned KV again or goes
through prefill once more with what was emitted: there is no third way.
"""

from __future__ import annotations

from collections import deque

from msgspec import Struct

from staffel.control.affinity import prompt_hashes
from staffel.control.jobs import Handoff, Instance, Job, Summary, summarise
from staffel.control.messages import (
    UNAVAILABLE_RETRY_S,
    Attach,
    Cancel,
    Decoded,
    Delta,
    Deltas,
    Detach,
    Ended,
    Event,
    Failed,
    Failure,
    HandoffReady,
    Hello,
    Order,
    Preempted,
    Prefilled,
    Pulled,
    PullFailed,
    PullKv,
    PullStarted,
    Release,
    Renew,
    Report,
    RouterConfig,
    Start,
    Tokens,
)
from staffel.control.queue import FairQueue
from staffel.control.request import FinishReason, Request, TokenLogprobs

MAX_LOSSES = 3
"""A request whose instance died this often is not tried again: it may be what kills them."""

MAX_FAILED_READS = 4
"""In a row; two for each time that its KV was computed. Nobody can read it then, and every token
would cost a prefill."""

_DEPARTURES = 32
"""How many of the last departures from the queue say how fast it moves."""
_LONGEST_RETRY_S = 600

News = Delta | Deltas | Failure


class Actions(Struct, frozen=True):
    """What the shell is to do."""

    orders: list[tuple[str, Order]]
    """By instance."""
    news: list[News]
    summaries: list[Summary]


class RouterCore:
    """The state machine of the router."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self._instances: dict[str, Instance] = {}
        self._jobs: dict[str, Job] = {}
        """In order of arrival."""
        self._queue = FairQueue()
        self._last_number = 0
        self._closing: dict[int, tuple[Instance, Handoff]] = {}
        """Cancelled pulls, by dispatch: the pin stays until the reader has answered."""
        self._departures: deque[int] = deque(maxlen=_DEPARTURES)
        """When the last requests left the queue."""
        self._last_dispatch = 0
        self._next_renewal = 0
        self._news: list[News] = []
        self._summaries: list[Summary] = []

    # ---- what the shell calls

    def submit(self, request: Request, now: int) -> Actions:
        """A new request. Refused with a Failure where it can't be taken."""
        self._last_number += 1
        job = Job(request, self._last_number, now)
        self._jobs[request.id] = job
        if not self._serves():
            self._fail(job, 503, "no instance is ready to serve", now)
        elif not self._holdable(job):
            self._fail(job, 503, "no instance has room for a request of this length", now)
        else:
            self._queue.add(job)
            self._dispatch_queue(now)
            if job in self._queue and len(self._queue) > self.config.max_queue:
                self._fail(job, 429, "too many requests are waiting (--max-queue)", now)
        return self._actions()

    def cancel(self, request_id: str, now: int) -> Actions:
        """The client has left, or wants no more."""
        job = self._jobs.get(request_id)
        if job is not None:
            self._withdraw(job)
            self._close(job, "cancelled", now)
            self._dispatch_queue(now)
        return self._actions()

    def join(self, hello: Hello, now: int) -> Actions:
        """An instance is ready. One of its name that was there before is lost by that."""
        before = self._instances.pop(hello.instance, None)
        joined = Instance(hello)
        for other in self._instances.values():
            self._introduce(joined, other)
        self._instances[joined.name] = joined
        if before is not None:
            self._lose(before, now)
        self._dispatch_queue(now)
        return self._actions()

    def lost(self, name: str, incarnation: int, now: int) -> Actions:
        """An instance is gone, with all that it held."""
        instance = self._instances.get(name)
        if instance is None or instance.hello.incarnation != incarnation:
            return self._actions()
        del self._instances[name]
        self._lose(instance, now)
        self._dispatch_queue(now)
        return self._actions()

    def _lose(self, instance: Instance, now: int) -> None:
        """Everything goes on without it: other instances, cancelled reads, jobs."""
        for other in self._instances.values():
            other.commands.append(Detach(instance.name, instance.hello.incarnation))
        for dispatch, (reader, handoff) in list(self._closing.items()):
            if instance in (reader, handoff.source):
                self._release(handoff)
                del self._closing[dispatch]
        for job in list(self._jobs.values()):
            self._survive(job, instance, now)
        self._fail_unservable(now)

    def receive(self, report: Report, now: int) -> Actions:
        """An instance's report. Doubled ones, and those of another incarnation, are dropped."""
        instance = self._instances.get(report.instance)
        if (
            instance is None
            or instance.hello.incarnation != report.incarnation
            or report.number <= instance.last_report
        ):
            return self._actions()
        instance.last_report = report.number
        for event in report.events:
            self._hear(instance, event, now)
        self._dispatch_queue(now)
        return self._actions()

    def tick(self, now: int) -> Actions:
        """Time passes: leases are renewed, and requests time out. About once a second."""
        if now >= self._next_renewal:
            self._next_renewal = now + self.config.lease_ns // 3
            self._renew_leases()
        self._time_out(now)
        self._dispatch_queue(now)
        return self._actions()

    @property
    def phases(self) -> bool:
        """Whether every phase has an instance."""
        return self._serves()

    @property
    def running(self) -> int:
        """Requests that are queued or running."""
        return len(self._jobs)

    @property
    def queued(self) -> int:
        return len(self._queue)

    # ---- choosing

    def _having(self, role: str) -> list[Instance]:
        return [instance for instance in self._instances.values() if instance.role == role]

    def _serves(self) -> bool:
        roles = {instance.role for instance in self._instances.values()}
        return "colocated" in roles or {"prefill", "decode"} <= roles

    def _prefillers(self) -> list[Instance]:
        """Who may compute prompts: prefill instances only while somebody can decode."""
        prefill = self._having("prefill") if self._having("decode") else []
        return prefill + self._having("colocated")

    def _holdable(self, job: Job) -> bool:
        """Whether each phase has an instance that could hold the whole sequence."""
        fits = {i.role for i in self._instances.values() if i.capacity >= job.most_tokens}
        return "colocated" in fits or {"prefill", "decode"} <= fits

    def _dispatch_queue(self, now: int) -> None:
        """Send off what the instances have room for."""
        while (job := self._queue.first) is not None:
            instance = self._local_decoder(job) or self._choose_prefiller(job)
            if instance is None:
                return
            self._start(job, instance, now)

    def _choose_prefiller(self, job: Job) -> Instance | None:
        """Least predicted time to first token: tokens to compute before and for it.

        None: all have as much ahead as they need; the job is better bound later.
        """
        best, best_key = None, None
        for number, instance in enumerate(self._prefillers()):
            uncached = self._uncached(job, instance)
            ahead = instance.queued_tokens
            if not self._within_window(instance, uncached):
                continue
            if instance.capacity < job.most_tokens or not self._may_join(job, instance):
                continue
            if instance.role == "prefill" and self._choose_decoder(job) is None:
                continue
            key = (ahead + uncached, uncached, instance.held_tokens, number)
            if best_key is None or key < best_key:
                best, best_key = instance, key
        return best

    def _local_decoder(self, job: Job) -> Instance | None:
        """A decode instance that may compute the prompt itself, as it is short enough."""
        if not self.config.local_prefill_below:
            return None
        instance = self._choose_decoder(job)
        if instance is None or not self._having("prefill"):
            return None
        uncached = self._uncached(job, instance)
        short = uncached < self.config.local_prefill_below
        return instance if short and self._within_window(instance, uncached) else None

    def _within_window(self, instance: Instance, uncached: int) -> bool:
        ahead = instance.queued_tokens
        return not ahead or ahead + uncached <= self.config.window_tokens

    def _choose_decoder(self, job: Job) -> Instance | None:
        """The one whose memory is least in use."""
        fitting = [
            i
            for i in self._having("decode")
            if i.capacity >= job.most_tokens and self._may_join(job, i)
        ]
        return min(fitting, key=lambda i: i.held_tokens / i.capacity, default=None)

    def _may_join(self, job: Job, instance: Instance) -> bool:
        """Whether nobody is put at stake: a suspect runs where nobody else is, and stays alone."""
        if not job.suspect:
            return not instance.suspects
        pinned = any(
            other.handoff is not None and other.handoff.source is instance and other is not job
            for other in self._jobs.values()
        )
        return not instance.jobs and not pinned

    def _uncached(self, job: Job, instance: Instance) -> int:
        if not job.request.use_cache:
            return job.length
        if job.hashes is None:
            job.hashes = prompt_hashes(job.request.prompt, self.config.block_size)
        return job.length - instance.index.matched(job.hashes) * self.config.block_size

    # ---- dispatching

    def _start(self, job: Job, instance: Instance, now: int) -> None:
        self._queue.serve(job)
        self._departures.append(now)
        job.stage = "prefill"
        job.dispatched_at = now
        job.queued_tokens = self._uncached(job, instance)
        instance.queued_tokens += job.queued_tokens
        if job.hashes is not None:
            instance.index.add(job.hashes)
        handoff = instance.role == "prefill"
        self._assign(job, instance)
        instance.commands.append(
            Start(job.dispatch, job.request, job.emitted.copy(), handoff=handoff)
        )
        job.prefill_instance = instance.name
        if not handoff:
            job.decode_instance = instance.name
            self._hold(job, instance)

    def _claim(self, job: Job, now: int) -> None:
        """Tell a decode instance to read the pinned KV."""
        handoff = job.handoff
        assert handoff is not None
        decoder = self._choose_decoder(job)
        if decoder is None:
            self._drop_handoff(job)
            self._requeue(job, now)
            return
        job.stage = "claimed"
        self._assign(job, decoder)
        self._hold(job, decoder)
        job.decode_instance = decoder.name
        if job.hashes is not None:
            decoder.index.add(job.hashes)
        ready, source = handoff.ready, handoff.source
        decoder.commands.append(
            PullKv(
                job.dispatch,
                job.request,
                job.emitted.copy(),
                source.name,
                source.hello.incarnation,
                ready.dispatch,
                ready.slot,
                ready.blocks,
                ready.tokens,
            )
        )

    def _assign(self, job: Job, instance: Instance) -> None:
        self._last_dispatch += 1
        job.dispatch = self._last_dispatch
        job.instance = instance
        job.alone = job.suspect
        instance.suspects += job.alone
        instance.jobs[job.dispatch] = job

    def _hold(self, job: Job, instance: Instance) -> None:
        job.held = True
        instance.held_tokens += job.length

    def _unassign(self, job: Job) -> None:
        """The current dispatch is over; its instance's load is taken off."""
        instance = job.instance
        if instance is None:
            return
        instance.jobs.pop(job.dispatch, None)
        instance.suspects -= job.alone
        job.alone = False
        instance.queued_tokens -= job.queued_tokens
        job.queued_tokens = 0
        if job.held:
            instance.held_tokens -= job.length
            job.held = False
        job.instance = None

    def _requeue(self, job: Job, now: int) -> None:
        """The recovery path: prompt and what was emitted through prefill again, before others."""
        self._unassign(job)
        job.stage = "queued"
        job.repeats += 1
        self._queue.add_again(job)
        if not self._holdable(job):
            self._fail(job, 503, "no instance is left to go on with the request", now)

    # ---- events

    def _hear(self, instance: Instance, event: Event, now: int) -> None:
        if isinstance(event, Decoded):
            self._decoded(instance, event, now)
            return
        if isinstance(event, Ended):
            self._ended(event)
            return
        job = instance.jobs.get(event.dispatch)
        if job is None:
            return  # of a dispatch that is over: the instance will hear or has heard so
        match event:
            case Tokens():
                self._tokens(job, event, now)
            case Prefilled():
                self._prefilled(job, event)
            case HandoffReady():
                self._handoff_ready(job, instance, event, now)
            case PullStarted():
                job.stage = "reading"
            case Pulled():
                self._pulled(job, event, now)
            case PullFailed():
                self._pull_failed(job, now)
            case Preempted():
                self._preempted(job, now)
            case Failed():
                self._unassign(job)
                self._drop_handoff(job)
                self._fail(job, 400, event.message, now)

    def _prefilled(self, job: Job, event: Prefilled) -> None:
        assert job.instance is not None
        job.instance.queued_tokens -= job.queued_tokens
        job.queued_tokens = 0
        if job.stage != "prefill":
            return  # computed again after a preemption
        if job.queue_ns is None:
            assert job.dispatched_at is not None
            job.queue_ns = job.dispatched_at - job.arrival + event.queued_ns
            job.prefill_ns = event.compute_ns
            job.cached_tokens = event.cached_tokens
            job.prompt_logprobs = event.prompt_logprobs

    def _decoded(self, instance: Instance, event: Decoded, now: int) -> None:
        news = Deltas([], [], [])
        for dispatch, index, token in zip(event.dispatches, event.indices, event.ids, strict=True):
            job = instance.jobs.get(dispatch)
            if job is None:
                continue
            if index != len(job.emitted):
                self._tokens(job, Tokens(dispatch, index, [token]), now)
                continue
            job.emitted.append(token)
            news.requests.append(job.request.id)
            news.indices.append(index)
            news.ids.append(token)
        if news.ids:
            self._news.append(news)
            instance.held_tokens += len(news.ids)

    def _tokens(self, job: Job, event: Tokens, now: int) -> None:
        known = len(job.emitted) - event.index
        if known < 0:
            self._withdraw(job)
            self._requeue(job, now)
            return
        if len(event.ids) <= known and event.finish is None:
            return
        ids = event.ids[known:]
        self._emit(job, ids, event.logprobs and event.logprobs[known:], event.finish)
        if job.first_token_at is None:
            job.first_token_at = now
        if job.held and job.instance is not None:
            job.instance.held_tokens += len(ids)
        if event.finish is not None:
            self._unassign(job)
            self._close(job, event.finish, now)
        elif job.stage == "prefill" and job.instance and job.instance.role != "prefill":
            job.stage = "decode"

    def _emit(
        self,
        job: Job,
        ids: list[int],
        logprobs: list[TokenLogprobs] | None,
        finish: FinishReason | None,
    ) -> None:
        first = job.first_token_at is None
        delta = Delta(
            job.request.id,
            len(job.emitted),
            ids,
            logprobs,
            finish,
            job.cached_tokens if first else None,
            job.prompt_logprobs if first else None,
        )
        job.emitted += ids
        self._news.append(delta)

    def _handoff_ready(self, job: Job, instance: Instance, event: HandoffReady, now: int) -> None:
        job.handoff = Handoff(instance, event, now)
        self._unassign(job)
        self._claim(job, now)

    def _pulled(self, job: Job, event: Pulled, now: int) -> None:
        """Confirmed; the prefill side may let go."""
        job.stage = "decode"
        job.failed_reads = 0
        handoff = job.handoff
        if handoff is None:
            return
        self._release(handoff)
        job.handoff = None
        job.handoff_ns = now - handoff.pinned_at
        job.read_ns = event.read_ns

    def _pull_failed(self, job: Job, now: int) -> None:
        """One more read if the KV is pinned still, else the recovery path; and not for ever."""
        self._unassign(job)
        job.failed_reads += 1
        if job.failed_reads >= MAX_FAILED_READS:
            self._drop_handoff(job)
            text = f"its KV couldn't be read {job.failed_reads} times; the log says more"
            self._fail(job, 503, text, now)
            return
        handoff = job.handoff
        if handoff is not None and not handoff.retried:
            handoff.retried = True
            self._claim(job, now)
            return
        self._drop_handoff(job)
        self._requeue(job, now)

    def _preempted(self, job: Job, now: int) -> None:
        """Blocks ran out there. What is pinned still can be read again."""
        self._unassign(job)
        if job.handoff is not None:
            self._claim(job, now)
        else:
            self._requeue(job, now)

    def _ended(self, event: Ended) -> None:
        """A cancelled reader has stopped, so its source may let go; or a lease has run out.

        After an expired lease the read fails its confirmation, which says all there is to say.
        """
        closing = self._closing.pop(event.dispatch, None)
        if closing is not None:
            self._release(closing[1])

    # ---- losses and endings

    def _survive(self, job: Job, dead: Instance, now: int) -> None:
        """What the loss of an instance means for one job."""
        handoff = job.handoff
        if handoff is not None and handoff.source is dead:
            job.handoff = None
            self._cancel_dispatch(job)
        elif job.instance is not dead:
            return
        job.losses += 1
        self._unassign(job)
        if job.losses >= MAX_LOSSES:
            self._drop_handoff(job)
            self._fail(job, 503, f"the instance died under this request {job.losses} times", now)
        elif job.handoff is not None:
            self._claim(job, now)
        else:
            self._requeue(job, now)

    def _fail_unservable(self, now: int) -> None:
        for job in self._queue.jobs:
            if not self._holdable(job):
                self._fail(job, 503, "no instance is left to serve the request", now)

    def _withdraw(self, job: Job) -> None:
        """Have all that instances keep for the job freed."""
        reader, dispatch, handoff = job.instance, job.dispatch, job.handoff
        self._cancel_dispatch(job)
        self._unassign(job)
        job.handoff = None
        if handoff is None:
            return
        if reader is None:
            self._release(handoff)
        else:
            self._closing[dispatch] = (reader, handoff)

    def _cancel_dispatch(self, job: Job) -> None:
        if job.instance is not None:
            job.instance.commands.append(Cancel(job.dispatch))

    def _drop_handoff(self, job: Job) -> None:
        if job.handoff is not None:
            self._release(job.handoff)
            job.handoff = None

    def _release(self, handoff: Handoff) -> None:
        handoff.source.commands.append(Release(handoff.ready.dispatch))

    def _fail(self, job: Job, status: int, message: str, now: int) -> None:
        self._news.append(Failure(job.request.id, status, message, self._retry_after(status, now)))
        self._close(job, str(status), now)

    def _retry_after(self, status: int, now: int) -> int | None:
        """Seconds: for a full queue how long it takes to move on, as fast as it did of late."""
        if status == 503:
            return UNAVAILABLE_RETRY_S
        if status != 429:
            return None
        if not self._departures:
            return 1
        gap = (now - self._departures[0]) // len(self._departures)
        return min(max(1, -(-gap * len(self._queue) // 10**9)), _LONGEST_RETRY_S)

    def _close(self, job: Job, outcome: str, now: int) -> None:
        self._queue.remove(job)
        del self._jobs[job.request.id]
        self._summaries.append(summarise(job, outcome, now))

    # ---- time

    def _renew_leases(self) -> None:
        handoffs = [job.handoff for job in self._jobs.values() if job.handoff is not None]
        handoffs += [handoff for _, handoff in self._closing.values()]
        by_source: dict[str, list[int]] = {}
        for handoff in handoffs:
            by_source.setdefault(handoff.source.name, []).append(handoff.ready.dispatch)
        for name, dispatches in by_source.items():
            if name in self._instances:
                self._instances[name].commands.append(Renew(dispatches))

    def _time_out(self, now: int) -> None:
        if not self.config.request_timeout_ns:
            return
        for job in list(self._jobs.values()):
            if now - job.arrival < self.config.request_timeout_ns:
                break
            self._withdraw(job)
            self._fail(job, 504, "the request took longer than --request-timeout", now)

    # ---- orders

    def _introduce(self, one: Instance, other: Instance) -> None:
        """Let decode instances map the memory of prefill instances."""
        for reader, source in ((one, other), (other, one)):
            if reader.role == "decode" and source.role == "prefill":
                hello = source.hello
                reader.commands.append(Attach(hello.instance, hello.incarnation, hello.region))

    def _actions(self) -> Actions:
        orders = []
        for instance in self._instances.values():
            if instance.commands:
                instance.last_order += 1
                order = Order(instance.hello.incarnation, instance.last_order, instance.commands)
                orders.append((instance.name, order))
                instance.commands = []
        actions = Actions(orders, self._news, self._summaries)
        self._news, self._summaries = [], []
        return actions
