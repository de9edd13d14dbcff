"""The whole system under a virtual clock: the real router and engines, and a shell around them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from staffel.bench.records import Record
from staffel.config import ConfigError
from staffel.control.jobs import Summary
from staffel.control.messages import (
    LEASE_NS,
    Delta,
    Deltas,
    Order,
    Report,
    RouterConfig,
    window_tokens,
)
from staffel.control.router import Actions, News, RouterCore
from staffel.sim.clock import Clock
from staffel.sim.cores import take
from staffel.sim.instance import SimulatedInstance
from staffel.sim.models import FREE, IDEAL, Arrival, InstanceModel, LinkModel, Shell
from staffel.sim.outcome import Outcome
from staffel.sim.requests import RequestMaker
from staffel.sim.witness import Witness

__all__ = ["FREE", "IDEAL", "Arrival", "InstanceModel", "LinkModel", "Outcome", "Shell", "simulate"]

TICK_NS = 10**9 // 4


def simulate(
    instances: Sequence[InstanceModel],
    link: LinkModel | None,
    arrivals: Sequence[Arrival],
    *,
    concurrency: int | None = None,
    token_times: bool = False,
    shell: Shell | None = None,
    stop: Callable[[Record], bool] | None = None,
) -> Outcome:
    """Run all arrivals to their end. The same arguments give the same outcome, bit for bit.

    Args:
        link: None: KV arrives in no time.
        arrivals: in order of time.
        concurrency: most requests in flight: one that is due waits for a place, and its time
            counts from when it gets one (a closed loop). None: no limit.
        token_times: keep the time of each token (for ITL and EMA), not only of first and last.
        shell: None: what `Shell` has by default.
        stop: gets the record of each request that ends; True ends the simulation.

    Raises:
        ConfigError: the instances make no placement, or differ in block size.
    """
    _check(instances)
    system = _System(
        instances, link or FREE, shell or Shell(), Witness(arrivals, token_times, stop)
    )
    return system.run(arrivals, concurrency or len(arrivals))


def _check(instances: Sequence[InstanceModel]) -> None:
    roles = {model.role for model in instances}
    if not ("colocated" in roles or {"prefill", "decode"} <= roles):
        raise ConfigError(
            "placement: needs prefill and decode instances, or colocated ones; "
            f"there are {', '.join(sorted(roles)) or 'none'}"
        )
    if len({model.block_size for model in instances}) > 1:
        raise ConfigError("placement: block_size must be the same for all instances")
    for model in instances:
        if model.kv_tokens < model.block_size:
            raise ConfigError(
                f"kv_tokens: {model.kv_tokens} of a {model.role} instance are less than a block"
            )


class _System:
    """Router, instances, and the messages between them."""

    def __init__(
        self,
        instances: Sequence[InstanceModel],
        link: LinkModel,
        shell: Shell,
        witness: Witness,
    ) -> None:
        self._clock = Clock()
        self._message_ns = round(shell.message_s * 1e9)
        self._request_ns = round(shell.request_s * 1e9)
        self._cpu = shell.cpu
        self._witness = witness
        self._maker = RequestMaker()
        self._router = RouterCore(_router_config(instances, shell))
        self._instances = {
            name: SimulatedInstance(
                name, model, link, shell, self._clock, self._send_report,
                prefix_cache=model.prefix_cache and witness.shares,
            )
            for name, model in _named(instances)
        }  # fmt: skip
        self._arrivals: Sequence[Arrival] = ()
        self._due: deque[int] = deque()
        """Arrivals whose time has come, but not their turn."""
        self._places = 0
        self._queue: list[tuple[float, int]] = []
        self._summaries: list[Summary] = []

    def run(self, arrivals: Sequence[Arrival], concurrency: int) -> Outcome:
        self._arrivals, self._places = arrivals, concurrency
        for instance in self._instances.values():
            others = [other for other in self._instances.values() if other is not instance]
            instance.neighbours = others if instance.model.slowdown else ()
            self._act(self._router.join(instance.hello, 0))
        if arrivals:
            self._clock.at(arrivals[0].at_ns, self._arrive, 0)
            self._clock.at(0, self._tick)
            self._clock.run()
        return Outcome(
            records=self._witness.records(),
            summaries=self._summaries,
            instances=[instance.use for instance in self._instances.values()],
            queue=self._queue,
            seconds=self._clock.now / 1e9,
        )

    # ---- requests

    def _arrive(self, number: int) -> None:
        self._due.append(number)
        if number + 1 < len(self._arrivals):
            self._clock.at(self._arrivals[number + 1].at_ns, self._arrive, number + 1)
        self._send_due(None)

    def _send_due(self, _: None) -> None:
        while self._due and self._places:
            self._places -= 1
            number = self._due.popleft()
            self._witness.sent(number, self._clock.now)
            self._clock.at(self._clock.now + self._request_ns, self._submit, number)

    def _submit(self, number: int) -> None:
        self._take(0, 1)
        request = self._maker.make(number, self._arrivals[number])
        self._act(self._router.submit(request, self._clock.now))

    # ---- messages

    def _send_report(self, report: Report) -> None:
        self._clock.at(self._clock.now + self._message_ns, self._receive, report)

    def _receive(self, report: Report) -> None:
        self._act(self._router.receive(report, self._clock.now))

    def _deliver(self, addressed: tuple[str, Order]) -> None:
        name, order = addressed
        self._instances[name].deliver(order)

    def _tick(self, _: None) -> None:
        assert self._clock.pending, "requests are open, but nothing will ever happen"
        now = self._clock.now
        self._act(self._router.tick(now))
        self._queue.append((now / 1e9, self._router.queued))
        for instance in self._instances.values():
            instance.use.sample(now / 1e9)
        self._clock.at(now + TICK_NS, self._tick)

    def _act(self, actions: Actions) -> None:
        now = self._clock.now
        for addressed in actions.orders:
            self._clock.at(now + self._message_ns, self._deliver, addressed)
        self._summaries += actions.summaries
        if not actions.news:
            return
        ended = self._witness.hear(actions.news, now)
        self._take(_tokens(actions.news), ended)
        if ended:
            self._places += ended
            self._clock.at(now, self._send_due)
        if self._witness.satisfied:
            self._clock.stop()

    def _take(self, tokens: int, requests: int) -> None:
        """Server and clients are at work: for tokens that go out, and requests that come or end."""
        if self._cpu is not None:
            seconds = self._cpu.seconds(tokens, requests)
            take(seconds, tuple(self._instances.values()), self._clock.now)


def _tokens(news: Sequence[News]) -> int:
    """That go out to clients."""
    return sum(
        len(one.requests) if isinstance(one, Deltas)
        else len(one.ids) if isinstance(one, Delta)
        else 0
        for one in news
    )  # fmt: skip


def _named(instances: Sequence[InstanceModel]) -> list[tuple[str, InstanceModel]]:
    """As a placement names them: prefill-0, prefill-1, decode-0 ..."""
    numbers: dict[str, int] = {}
    named = []
    for model in instances:
        number = numbers.get(model.role, 0)
        numbers[model.role] = number + 1
        named.append((f"{model.role}-{number}", model))
    return named


def _router_config(instances: Sequence[InstanceModel], shell: Shell) -> RouterConfig:
    return RouterConfig(
        block_size=instances[0].block_size,
        lease_ns=LEASE_NS,
        local_prefill_below=shell.local_prefill_below,
        window_tokens=shell.window_tokens
        or max(window_tokens(model.chunk_tokens, model.pp) for model in instances),
        max_queue=shell.max_queue,
    )
