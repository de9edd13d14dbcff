"""What could be run: a cluster, the instances that fit on it, and groups of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from typing import NamedTuple

from staffel.config import ConfigError, Policy, Role
from staffel.latency.model import LatencyModel
from staffel.latency.profile import Slowdown
from staffel.sim.models import InstanceModel, LinkModel

BLOCK_SIZE = 16


class Parallel(NamedTuple):
    """Tensor times pipeline parallel."""

    tp: int = 1
    pp: int = 1

    @property
    def devices(self) -> int:
        return self.tp * self.pp

    def __str__(self) -> str:
        parts = [f"tp{self.tp}"] if self.tp > 1 else []
        parts += [f"pp{self.pp}"] if self.pp > 1 else []
        return " ".join(parts) or "tp1"


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Like nodes of like devices (GPUs; on a CPU host, the cores of one instance)."""

    nodes: int
    devices_per_node: int
    intra_node: float
    """Bytes per second that each device exchanges with others of its node."""
    inter_node: float
    """Bytes per second between a node and the others, shared by its devices."""
    fixed_s: float = 0.0
    """Seconds that a read takes beyond its bytes."""
    beside: bool = True
    """Whether a read runs beside the steps of who reads (a GPU), or within them (a CPU)."""

    def __post_init__(self) -> None:
        for option, count in (("--nodes", self.nodes), ("--gpus-per-node", self.devices_per_node)):
            if count < 1:
                raise ConfigError(f"{option}: must be at least 1")
        for option, speed in (("--intra-node", self.intra_node), ("--inter-node", self.inter_node)):
            if not speed > 0:
                raise ConfigError(f"{option}: must be above 0 bytes per second")

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node

    def parallels(self, layers: int, heads: int) -> Iterator[Parallel]:
        """All (tp, pp) that can be placed: tp within one node, dividing the attention heads; pp
        dividing the layers, each stage in one node."""
        for tp in _divisors(heads, self.devices_per_node):
            stages_per_node = self.devices_per_node // tp
            for pp in _divisors(layers, self.nodes * stages_per_node):
                yield Parallel(tp, pp)


def _divisors(number: int, limit: int) -> list[int]:
    return [d for d in range(1, limit + 1) if number % d == 0]


class Build(NamedTuple):
    """One instance of the model at some parallelism."""

    latency: LatencyModel
    kv_tokens: int
    """Tokens of KV that fit beside the weights."""


@dataclass(frozen=True, kw_only=True)
class Engines:
    """The instances of one model that can be had: by a profile, a hardware sheet, or a table."""

    model: str
    kv_bytes_per_token: int
    builds: Mapping[Parallel, Build]
    max_sequences: int = 256
    """Of each batch in flight."""
    block_size: int = BLOCK_SIZE
    slowdown: Mapping[str, Mapping[str, Slowdown]] = field(default_factory=dict)
    """Of instances that share a host, as `InstanceModel` has it."""

    def instance(self, group: Group) -> InstanceModel:
        build = self.builds[group.parallel]
        return InstanceModel(
            role=group.role,
            latency=build.latency,
            kv_tokens=build.kv_tokens,
            chunk_tokens=group.chunk_tokens,
            policy=group.policy,
            max_sequences=self.sequences(group.parallel),
            block_size=self.block_size,
            pp=group.parallel.pp,
            devices=group.parallel.devices,
            slowdown=self.slowdown,
        )

    def sequences(self, parallel: Parallel) -> int:
        """Most sequences that an instance holds: its pipeline has as many batches in flight."""
        return self.max_sequences * parallel.pp

    def instances(self, unit: Unit) -> tuple[InstanceModel, ...]:
        return tuple(self.instance(group) for group in unit.groups for _ in range(group.count))


@dataclass(frozen=True, kw_only=True)
class Group:
    """`count` like instances of one role."""

    role: Role
    parallel: Parallel
    count: int = 1
    chunk_tokens: int
    policy: Policy = "chunked"

    @property
    def devices(self) -> int:
        return self.count * self.parallel.devices


@dataclass(frozen=True)
class Unit:
    """Groups that serve together: prefill and decode, or colocated alone."""

    groups: tuple[Group, ...]

    @property
    def devices(self) -> int:
        return sum(group.devices for group in self.groups)

    @property
    def colocated(self) -> bool:
        return self.groups[0].role == "colocated"

    def group(self, role: Role) -> Group:
        return next(group for group in self.groups if group.role == role)

    def times(self, copies: int) -> Unit:
        """So many of each instance."""
        groups = (replace(group, count=group.count * copies) for group in self.groups)
        return Unit(tuple(groups))

    def short(self) -> str:
        """Like "2P1D" or "3C"."""
        letters = {"prefill": "P", "decode": "D", "colocated": "C"}
        return "".join(f"{group.count}{letters[group.role]}" for group in self.groups)

    def __str__(self) -> str:
        """Like "2P1D (prefill tp2, decode tp1)"."""
        return f"{self.short()} ({', '.join(map(_described, self.groups))})"


def _described(group: Group) -> str:
    words = [group.role, str(group.parallel)]
    if group.role == "colocated":
        words.append(
            f"chunks of {group.chunk_tokens}" if group.policy == "chunked" else group.policy
        )
    return " ".join(words)


# ---- what fits where


def high_affinity(
    cluster: Cluster, prefill: Group, decode: Group, largest: int
) -> Iterator[tuple[Unit, int]]:
    """Units of at most `largest` instances placed anywhere, and all numbers of copies that fit."""
    for unit in _units(prefill, decode, largest):
        for copies in range(1, cluster.devices // unit.devices + 1):
            if not packs(cluster, unit.times(copies)):
                break
            yield unit, copies


def low_affinity(
    cluster: Cluster, prefill: Group, decode: Group, largest: int
) -> Iterator[tuple[Unit, int]]:
    """The same for units whose segments of a pipeline stage share a node.

    DistServe (OSDI 2024), algorithm 2: a layer then lies on the same node in both phases, so KV
    never leaves it.
    """
    if prefill.parallel.pp != decode.parallel.pp:
        return
    for unit in _units(prefill, decode, largest):
        segment = sum(group.count * group.parallel.tp for group in unit.groups)
        segments = cluster.nodes * (cluster.devices_per_node // segment)
        for copies in range(1, segments // prefill.parallel.pp + 1):
            yield unit, copies


def _units(prefill: Group, decode: Group, largest: int) -> Iterator[Unit]:
    """All proportions n:m, in lowest terms."""
    for n, m in product(range(1, largest), repeat=2):
        if n + m <= largest and math.gcd(n, m) == 1:
            yield Unit((replace(prefill, count=n), replace(decode, count=m)))


def packs(cluster: Cluster, unit: Unit) -> bool:
    """Whether every pipeline stage finds `tp` free devices on one node."""
    if unit.devices > cluster.devices:
        return False
    sizes = sorted({group.parallel.tp for group in unit.groups})
    steps = pairwise([*sizes, cluster.devices_per_node])
    if all(larger % smaller == 0 for smaller, larger in steps):
        return True  # the largest first leave no gap that a smaller one doesn't fill
    free = [cluster.devices_per_node] * cluster.nodes
    stages = [g.parallel.tp for g in unit.groups for _ in range(g.count * g.parallel.pp)]
    return all(_place(free, tp) for tp in sorted(stages, reverse=True))


def _place(free: list[int], tp: int) -> bool:
    node = next((i for i, devices in enumerate(free) if devices >= tp), None)
    if node is None:
        return False
    free[node] -= tp
    return True


def nodes_needed(cluster: Cluster, unit: Unit) -> int:
    """Nodes that the unit takes, packed as `packs` does."""
    for nodes in range(1, cluster.nodes):
        if packs(replace(cluster, nodes=nodes), unit):
            return nodes
    return cluster.nodes


# ---- how KV gets from prefill to decode


def device_bandwidth(cluster: Cluster, *, within_node: bool) -> float:
    """Bytes per second of one device; between nodes, its share of the node's connection."""
    if within_node or cluster.nodes == 1:
        return cluster.intra_node
    return min(cluster.intra_node, cluster.inter_node / cluster.devices_per_node)


def link(cluster: Cluster, unit: Unit, kv_bytes_per_token: int, *, within_node: bool) -> LinkModel:
    """What one decode instance reads with.

    Each of its devices reads at its own speed, from no more devices than a prefill instance has.
    """
    paths = min(group.parallel.devices for group in unit.groups)
    return LinkModel(
        bytes_per_second=paths * device_bandwidth(cluster, within_node=within_node),
        fixed_s=cluster.fixed_s,
        kv_bytes_per_token=kv_bytes_per_token,
        beside=cluster.beside,
    )


def link_limit(
    cluster: Cluster, unit: Unit, bytes_per_request: float, *, within_node: bool
) -> float:
    """Most requests per second whose KV the devices of the smaller phase can pass on."""
    devices = min(group.devices for group in unit.groups)
    return devices * device_bandwidth(cluster, within_node=within_node) / bytes_per_request
