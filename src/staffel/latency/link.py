"""What a KV handoff costs on a link."""

from __future__ import annotations

import re

import msgspec

from staffel.config import ConfigError
from staffel.latency.model import LatencyModel, Work
from staffel.latency.shape import ModelShape

_PREFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_PREFIXES |= {f"{prefix}i": 1024 ** (i + 1) for i, prefix in enumerate("kmgt")}
_RATE = re.compile(r"(?:(\d+)\s*x\s*)?(\d+(?:\.\d+)?)\s*([kmgt]?i?)(b|bit|B)/?(s|ps)", re.ASCII)


def parse_bandwidth(text: str, field: str = "--link") -> float:
    """Bytes per second from "64GB/s", "8x64GB/s", "25Gb/s" (bits) or "50GiB/s".

    Raises:
        ConfigError: the text is none of these.
    """
    prefix_in_lower_case = re.sub(r"[KMGT](?=i?[bB])", lambda m: m[0].lower(), text.strip())
    match = _RATE.fullmatch(prefix_in_lower_case)
    if match is None:
        raise ConfigError(f'{field}: cannot read {text!r}; write it like "8x64GB/s" or "25Gb/s"')
    links, number, prefix, unit, _ = match.groups()
    rate = int(links or 1) * float(number) * _PREFIXES[prefix] / (1 if unit == "B" else 8)
    if rate <= 0:
        raise ConfigError(f"{field}: must be above 0")
    return rate


class KvCost(msgspec.Struct, frozen=True, kw_only=True):
    """What it takes to hand one sequence over."""

    bytes_per_token: int
    tokens: int
    bytes_per_second: float

    @property
    def size(self) -> int:
        """Bytes of the whole sequence."""
        return self.bytes_per_token * self.tokens

    @property
    def seconds(self) -> float:
        """Of the transfer, at the full bandwidth."""
        return self.size / self.bytes_per_second

    @property
    def binary_seconds(self) -> float:
        """With the link's giga read as 2^30, as the DistServe authors count their 17.6 ms."""
        return self.seconds * 1e9 / 2**30

    def decode_steps(self, latency: LatencyModel, sequences: int = 1) -> float:
        """How many decode steps of `sequences` sequences of this length it lasts."""
        return self.seconds / latency.step_seconds(Work.decode(sequences, self.tokens))


def kv_cost(
    shape: ModelShape, tokens: int, bytes_per_second: float, *, bytes_per_value: float = 2
) -> KvCost:
    """Cost of `tokens` tokens' KV. Raises ConfigError unless there is at least one."""
    if tokens < 1:
        raise ConfigError("--tokens: must be at least 1")
    return KvCost(
        bytes_per_token=shape.kv_bytes_per_token(bytes_per_value),
        tokens=tokens,
        bytes_per_second=bytes_per_second,
    )
