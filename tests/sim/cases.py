"""Instances with round numbers, to compute by hand with."""

from __future__ import annotations

from itertools import islice

from staffel.bench.arrivals import Arrivals, arrival_times
from staffel.latency.model import Work
from staffel.sim.models import Arrival, InstanceModel

SECOND = 10**9


class Constant:
    """A step takes the same time, whatever it computes."""

    def __init__(self, prompt_s: float, decode_s: float = 0.0) -> None:
        self._prompt_s = prompt_s
        self._decode_s = decode_s

    def step_seconds(self, work: Work) -> float:
        return self._prompt_s if work.prompts else self._decode_s


class Linear:
    """A millisecond a step, and so many seconds for each prompt token and decoding sequence."""

    def __init__(self, per_prompt_token: float = 1e-4, per_decode: float = 1e-3) -> None:
        self._per_prompt_token = per_prompt_token
        self._per_decode = per_decode

    def step_seconds(self, work: Work) -> float:
        return 1e-3 + self._per_prompt_token * work.prompt_tokens + self._per_decode * work.decodes


def model(role: str, latency: object = None, **settings: object) -> InstanceModel:
    defaults = {"kv_tokens": 1_000_000, "chunk_tokens": 512, "max_sequences": 1000}
    return InstanceModel(role=role, latency=latency or Linear(), **{**defaults, **settings})  # type: ignore[arg-type]


def poisson(rate: float, requests: int, prompt: int, output: int, seed: int = 1) -> list[Arrival]:
    times = islice(arrival_times(Arrivals("poisson"), rate, seed), requests)
    return [Arrival(round(at * SECOND), prompt, output) for at in times]


def at_once(requests: int, prompt: int, output: int) -> list[Arrival]:
    return [Arrival(0, prompt, output)] * requests
