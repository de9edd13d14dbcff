"""Threads and cores of instances."""

from __future__ import annotations

import pytest

from staffel.config import ConfigError, InstanceSpec
from staffel.runtime.deployment import share_cores


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
