"""From what the command line says to what is planned for."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

from staffel.bench.session import read_slo
from staffel.bench.workloads import parse_workload
from staffel.config import ConfigError, check_choice
from staffel.latency.hardware import WEIGHT_BYTES, hardware_named
from staffel.latency.link import parse_bandwidth
from staffel.latency.profile import Profile
from staffel.latency.shape import Mla
from staffel.plan import sources
from staffel.plan.candidates import Cluster, Engines
from staffel.plan.pool import Task, draw
from staffel.plan.question import Affinity, Question
from staffel.plan.result import Setting
from staffel.sim.models import shell_of
from staffel.sim.sources import check_source

GPUS_PER_NODE = 8
SAMPLE = 1000
"""Requests that bounds are computed from."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The options of `staffel plan`."""

    profile: Path | None
    hardware: str | None
    model: str | None
    dtype: str | None
    mla: str
    nodes: int
    devices_per_node: int | None
    intra_node: str | None
    inter_node: str
    kv_memory: str | None
    host_cpu: str | None
    workload: str
    scale_lengths: float
    max_model_len: int | None
    slo: str
    attainment: float
    rate: float | None
    affinity: str
    executable: bool
    seed: int
    requests: int


@dataclass(frozen=True)
class Prepared:
    """Ready to search."""

    question: Question
    task: Task
    setting: Setting


def prepare(given: Inputs) -> Prepared:
    """Raises ConfigError naming the option that is wrong."""
    check_choice("--affinity", given.affinity, get_args(Affinity))
    check_choice("--mla", given.mla, get_args(Mla))
    check_source(given.profile, given.hardware, given.model)
    if given.executable and given.nodes > 1:
        raise ConfigError("--executable: serve runs on one host; leave out --nodes")
    workload = parse_workload(
        given.workload, scale_lengths=given.scale_lengths, max_model_len=given.max_model_len
    )
    drawn = draw(workload, given.seed)
    cluster, engines, basis, more = (
        _from_profile(given) if given.profile is not None else _from_hardware(given)
    )
    if given.executable:
        engines = sources.executable(engines)
    question = Question(
        cluster=cluster,
        engines=engines,
        lengths=drawn[:SAMPLE],
        slo=read_slo(given.slo),
        attainment=given.attainment,
        rate=given.rate,
        affinity=cast(Affinity, given.affinity),
    )
    setting = Setting(basis=basis, workload=workload.name, model=engines.model, **more)
    shell = shell_of(given.host_cpu)
    task = Task(drawn, given.attainment, given.seed, given.requests, shell)
    return Prepared(question, task, setting)


_Source = tuple[Cluster, Engines, str, dict[str, Any]]


def _from_hardware(given: Inputs) -> _Source:
    assert given.hardware is not None
    assert given.model is not None
    if given.kv_memory is not None:
        raise ConfigError("--kv-memory: goes with --profile; a sheet knows what fits")
    dtype = given.dtype or "bfloat16"
    check_choice("--dtype", dtype, tuple(WEIGHT_BYTES))
    sheet = hardware_named(given.hardware)
    cluster = Cluster(
        nodes=given.nodes,
        devices_per_node=given.devices_per_node or GPUS_PER_NODE,
        intra_node=_bandwidth(given.intra_node, "--intra-node", sheet.link_bytes_per_second),
        inter_node=parse_bandwidth(given.inter_node, "--inter-node"),
    )
    mla = cast(Mla, given.mla)
    engines, notes = sources.from_hardware(sheet, given.model, cluster, dtype=dtype, mla=mla)
    return cluster, engines, sheet.basis(dtype), {"assumptions": tuple(notes)}


def _from_profile(given: Inputs) -> _Source:
    assert given.profile is not None
    for option, value in (("--model", given.model), ("--dtype", given.dtype)):
        if value is not None:
            raise ConfigError(f"{option}: goes with --hardware; the profile names its own")
    profile = Profile.load(given.profile)
    cluster = Cluster(
        nodes=given.nodes,
        devices_per_node=given.devices_per_node or _places(profile),
        intra_node=_bandwidth(given.intra_node, "--intra-node", profile.transfer.bytes_per_second),
        inter_node=parse_bandwidth(given.inter_node, "--inter-node"),
        fixed_s=profile.transfer.fixed_s,
        beside=profile.device != "cpu",
    )
    engines = sources.from_profile(
        profile, cluster, profile.kv_bytes(given.kv_memory, "--kv-memory")
    )
    more: dict[str, Any] = {"serving": _serving(profile)}
    if profile.device == "cpu":
        more["device_word"] = "core" if profile.threads == 1 else f"{profile.threads} cores"
    if profile.interrupted:
        more["assumptions"] = ("the profile was cut short while it was measured",)
    return cluster, engines, profile.basis, more


def _places(profile: Profile) -> int:
    """Instances that the machine has cores for, without any shared."""
    if profile.device != "cpu":
        return GPUS_PER_NODE
    cores = profile.cores or len(os.sched_getaffinity(0))
    return max(1, cores // max(1, profile.threads))


def _serving(profile: Profile) -> dict[str, Any]:
    """As it was measured, so it is served."""
    fields: dict[str, Any] = {"dtype": profile.dtype, "device": profile.device}
    if profile.device == "cpu":
        fields["threads"] = profile.threads
    if profile.quantization is not None:
        fields["quantization"] = profile.quantization
    return fields


def _bandwidth(text: str | None, option: str, default: float) -> float:
    return default if text is None else parse_bandwidth(text, option)
