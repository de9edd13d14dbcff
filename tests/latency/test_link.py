"""What a handoff costs, from the numbers that a user types."""

from __future__ import annotations

import pytest

from staffel.config import ConfigError
from staffel.latency.hardware import hardware_named
from staffel.latency.link import kv_cost, parse_bandwidth
from staffel.latency.roofline import RooflineModel
from staffel.latency.shape import shape_of


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("64GB/s", 64e9),
        ("8x64GB/s", 512e9),
        ("25Gb/s", 25e9 / 8),
        ("25 gbps", 25e9 / 8),
        ("1.5GiB/s", 1.5 * 2**30),
        ("100MB/s", 1e8),
    ],
)
def test_bandwidths(text: str, rate: float) -> None:
    assert parse_bandwidth(text) == pytest.approx(rate)


@pytest.mark.parametrize("text", ["", "fast", "64", "64GB", "0GB/s", "x64GB/s", "-1GB/s"])
def test_what_is_no_bandwidth_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--inter-node"):
        parse_bandwidth(text, "--inter-node")


def test_opt_175b_over_eight_pcie_links() -> None:
    cost = kv_cost(shape_of("opt-175b"), 2048, parse_bandwidth("8x64GB/s"))
    assert cost.bytes_per_token == 4.5 * 2**20
    assert cost.seconds == pytest.approx(18.9e-3, rel=2e-3)
    assert cost.binary_seconds == pytest.approx(17.6e-3, rel=2e-3)


def test_it_is_less_than_a_decode_step() -> None:
    shape = shape_of("opt-175b")
    latency = RooflineModel(hardware_named("a100-80g"), shape, tp=8)
    cost = kv_cost(shape, 2048, parse_bandwidth("8x64GB/s"))
    assert 0.3 < cost.decode_steps(latency) < 1


def test_no_tokens_are_refused() -> None:
    with pytest.raises(ConfigError, match="--tokens"):
        kv_cost(shape_of("opt-13b"), 0, 1e9)
