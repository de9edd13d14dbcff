"""A closed loop over a latency model: so many clients, each sending its next request at once when
the last one ends. What it gives is TTFT under load, which a step's time alone doesn't tell."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import ceil
from typing import Literal, NamedTuple

from staffel.latency.model import LatencyModel, Work, pairs

Policy = Literal["chunked", "whole", "prefill-first"]


@dataclass(frozen=True, kw_only=True)
class Engine:
    """How a serving engine forms its batches."""

    policy: Policy
    """chunked: decode first, the rest of the budget for prompts (vLLM); whole: prompts uncut beside
    the decoding ones (TensorRT-LLM); prefill-first: prompts alone, decode waits (SGLang)."""
    budget: int = 8192
    """Most tokens of a step."""
    slots_lost: int = 0
    """Slots of the batch that stay empty while a finished request is being answered."""
    reserved_output: float = 1.0
    """Share of a request's output for which memory is set aside when it is let in."""
    answer_s: float = 0.0
    """Per output token, of the one process that streams all answers: where it is the bottleneck,
    first and last tokens are late by the same backlog, and the next request comes later."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """What the clients ask for."""

    clients: int
    prompt_tokens: int
    output_tokens: int
    least: float = 1.0
    """Lengths are drawn evenly between this share of the nominal ones and the whole."""
    rounds: int = 4
    """Requests per client; the first round, when all start at once, and the rest are told apart."""


class Times(NamedTuple):
    ttft: float
    tpot: float


@dataclass(slots=True)
class _Request:
    sent: float
    prompt: int
    output: int
    done: int = 0
    """Prompt tokens computed."""
    first_token: float = 0.0


@dataclass
class Loop:
    """State of one run."""

    model: LatencyModel
    engine: Engine
    load: Load
    kv_tokens: int
    now: float = 0.0
    steps: int = 0
    context: int = 0
    reserved: float = 0.0
    waiting: deque[_Request] = field(default_factory=deque)
    prompts: deque[_Request] = field(default_factory=deque)
    running: list[tuple[int, int, _Request]] = field(default_factory=list)
    """(step at which it ends, order of start, request)."""
    started: int = 0
    answered: float = 0.0
    """When the process that answers has streamed all tokens so far."""
    times: list[Times] = field(default_factory=list)
    """In the order in which requests ended."""

    def run(self) -> list[Times]:
        """Times of all requests."""
        lengths = self._lengths()
        for _ in range(self.load.clients):
            self._send(lengths)
        while len(self.times) < self.load.clients * self.load.rounds:
            self._admit()
            if self.prompts:
                self._step_with_prompts()
            elif self.running:
                self._decode_on()
            else:
                self.now = self.waiting[0].sent
            self._end(lengths)
        return self.times

    def _lengths(self) -> Iterator[tuple[int, int]]:
        draw, least = random.Random(0), self.load.least
        while True:
            yield (
                max(1, round(self.load.prompt_tokens * draw.uniform(least, 1))),
                max(2, round(self.load.output_tokens * draw.uniform(least, 1))),
            )

    def _send(self, lengths: Iterator[tuple[int, int]]) -> None:
        self.waiting.append(_Request(self.now + self._backlog(), *next(lengths)))

    def _backlog(self) -> float:
        return max(0.0, self.answered - self.now)

    def _pass(self, seconds: float, tokens: int) -> None:
        """Time passes, in which `tokens` output tokens are made."""
        self.answered = max(self.answered, self.now) + tokens * self.engine.answer_s
        self.now += seconds

    def _need(self, request: _Request) -> float:
        return request.prompt + self.engine.reserved_output * request.output

    def _admit(self) -> None:
        slots = max(1, self.load.clients - self.engine.slots_lost)
        while (
            self.waiting
            and self.waiting[0].sent <= self.now
            and len(self.running) + len(self.prompts) < slots
        ):
            need = self._need(self.waiting[0])
            if self.reserved and self.reserved + need > self.kv_tokens:
                return
            self.reserved += need
            self.prompts.append(self.waiting.popleft())

    def _step_with_prompts(self) -> None:
        decodes = 0 if self.engine.policy == "prefill-first" else len(self.running)
        chunks = self._chunks(decodes)
        work = Work(
            prompt_tokens=sum(new for _, new in chunks),
            prompt_pairs=sum(pairs(new, request.done) for request, new in chunks),
            prompts=len(chunks),
            decodes=decodes,
            decode_context=self.context if decodes else 0,
        )
        self._pass(self.model.step_seconds(work), decodes)
        if decodes:
            self.steps += 1
            self.context += decodes
        for request, new in chunks:
            request.done += new
            if request.done == request.prompt:
                self._first_token(request)

    def _chunks(self, decodes: int) -> list[tuple[_Request, int]]:
        """Prompts of the next step, in order, with their new tokens."""
        chunks: list[tuple[_Request, int]] = []
        left = max(self.engine.budget - decodes, 64)
        for request in self.prompts:
            new = request.prompt - request.done
            if new > left:
                if self.engine.policy == "whole" and not chunks:
                    chunks.append((request, new))
                elif self.engine.policy != "whole" and left:
                    chunks.append((request, left))
                break
            chunks.append((request, new))
            left -= new
        return chunks

    def _first_token(self, request: _Request) -> None:
        self.prompts.popleft()
        request.first_token = self.now + self._backlog()
        self.context += request.prompt
        self.started += 1
        heappush(self.running, (self.steps + request.output - 1, self.started, request))

    def _decode_on(self) -> None:
        """Until a request ends or one comes: batches are alike but for their context."""
        count, steps = len(self.running), max(1, self.running[0][0] - self.steps)
        each = self._decode_seconds(count, steps)
        if self.waiting and self.now < self.waiting[0].sent < self.now + steps * each:
            steps = ceil((self.waiting[0].sent - self.now) / each)
            each = self._decode_seconds(count, steps)
        self._pass(steps * each, steps * count)
        self.steps += steps
        self.context += count * steps

    def _decode_seconds(self, count: int, steps: int) -> float:
        """Of each of `steps` steps, on average."""
        middle = self.context + count * (steps - 1) // 2
        return self.model.step_seconds(Work(decodes=count, decode_context=middle))

    def _end(self, lengths: Iterator[tuple[int, int]]) -> None:
        while self.running and self.running[0][0] <= self.steps:
            _, _, request = heappop(self.running)
            self.context -= request.prompt + request.output - 1
            self.reserved -= self._need(request)
            tpot = (self.now + self._backlog() - request.first_token) / (request.output - 1)
            self.times.append(Times(request.first_token - request.sent, tpot))
            self._send(lengths)
