"""Threads and cores of instances."""

from __future__ import annotations

from typing import Any

import pytest

from staffel.config import ConfigError, InstanceSpec, ModelSpec, ParallelSpec, Placement
from staffel.runtime.deployment import make_jobs, share_cores

MODEL = ModelSpec(
    name="m", path="m", model_type="llama", architecture="Llama", vocab_size=8,
    max_model_len=8, eos_ids=(),
)  # fmt: skip


def specs(*threads: int | None) -> list[InstanceSpec]:
    return [InstanceSpec(role="colocated", threads=count) for count in threads]


def test_cores_are_shared_out_evenly_and_disjoint() -> None:
    assert share_cores(specs(None, None), [0, 1, 2, 3]) == ([2, 2], [(0, 1), (2, 3)])


def test_given_threads_are_kept() -> None:
    assert share_cores(specs(3, 1), [4, 5, 6, 7]) == ([3, 1], [(4, 5, 6), (7,)])


def test_more_threads_than_cores_are_refused() -> None:
    with pytest.raises(ConfigError, match="--threads: 3"):
        share_cores(specs(3), [0, 1])


def test_nobody_is_pinned_where_cores_are_too_few() -> None:
    assert share_cores(specs(None, None, None), [0, 1]) == ([1, 1, 1], [None] * 3)
    assert share_cores(specs(2, 1), [0, 1]) == ([2, 1], [None] * 2)


@pytest.mark.parametrize(
    ("instance", "placement", "named"),
    [
        ({"parallel": ParallelSpec(tp=2)}, {}, "parallel: tp: 2"),
        ({"parallel": ParallelSpec(pp=3)}, {}, "parallel: pp: 3"),
        ({}, {"hosts": 2}, "hosts: 2"),
    ],
)
def test_what_can_only_be_planned_is_refused_by_name(
    instance: dict[str, Any], placement: dict[str, Any], named: str
) -> None:
    planned = Placement(instances=(InstanceSpec(role="colocated", **instance),), **placement)
    with pytest.raises(ConfigError, match=f"{named} can't be served yet"):
        make_jobs(planned, MODEL, endpoint="ipc:///nowhere")


def test_instances_on_gpus_know_their_turn() -> None:
    placement = Placement(
        instances=(
            InstanceSpec(role="prefill", count=2, device="cuda"),
            InstanceSpec(role="decode", device="cuda"),
            InstanceSpec(role="colocated", device="cpu"),
        )
    )
    jobs = make_jobs(placement, MODEL, endpoint="ipc:///nowhere")
    turns = {job.name: job.gpu_turn for job in jobs if job.spec.device == "cuda"}
    assert turns == {"prefill-0": (0, 3), "prefill-1": (1, 3), "decode-0": (2, 3)}
