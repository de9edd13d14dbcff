from __future__ import annotations

import pytest

from staffel.bench.workload import Lengths
from staffel.config import ConfigError
from staffel.latency.model import FittedModel, Regime
from staffel.plan import bounds
from staffel.plan.candidates import (
    Build,
    Cluster,
    Group,
    Parallel,
    Unit,
    high_affinity,
    link,
    link_limit,
    low_affinity,
    nodes_needed,
    packs,
)


def cluster(nodes: int, devices: int, **more) -> Cluster:
    fields = {"intra_node": 100e9, "inter_node": 8e9, **more}
    return Cluster(nodes=nodes, devices_per_node=devices, **fields)


def group(role: str, tp: int = 1, pp: int = 1, count: int = 1) -> Group:
    return Group(role=role, parallel=Parallel(tp, pp), count=count, chunk_tokens=512)


def unit(prefill: Group, decode: Group) -> Unit:
    return Unit((prefill, decode))


def test_tensor_parallelism_stays_in_a_node_and_divides_heads_pipelines_divide_layers():
    found = set(cluster(2, 4).parallels(layers=6, heads=6))
    assert found == {
        Parallel(1, 1), Parallel(1, 2), Parallel(1, 3), Parallel(1, 6),
        Parallel(2, 1), Parallel(2, 2), Parallel(2, 3),
        Parallel(3, 1), Parallel(3, 2),
    }  # fmt: skip


def test_stages_are_packed_into_nodes():
    wide = unit(group("prefill", tp=3), group("decode", tp=3))
    assert not packs(cluster(1, 4), wide)  # 6 of 4 devices
    assert packs(cluster(2, 4), wide)
    assert not packs(cluster(1, 8), wide.times(2))  # 12 of 8
    assert not packs(cluster(3, 4), wide.times(2))  # 12 of 12, but 3 of each 4 only
    assert nodes_needed(cluster(4, 4), wide.times(2)) == 4


def test_high_affinity_takes_any_proportion_that_fits():
    found = {
        placed.times(copies).short()
        for placed, copies in high_affinity(cluster(1, 4), group("prefill"), group("decode"), 8)
    }
    assert found == {"1P1D", "2P2D", "1P2D", "2P1D", "1P3D", "3P1D"}


def test_low_affinity_keeps_the_segments_of_a_stage_in_a_node():
    two_stages = low_affinity(
        cluster(2, 4), group("prefill", tp=2, pp=2), group("decode", tp=1, pp=2), 8
    )
    found = {placed.times(copies).short() for placed, copies in two_stages}
    assert found == {"1P1D", "1P2D"}  # 2 + 1 and 2 + 2 devices of each stage; 1P1D once a node
    assert not list(low_affinity(cluster(2, 4), group("prefill", pp=2), group("decode"), 8))


def test_kv_goes_as_fast_as_its_devices_or_their_share_of_the_nodes_connection():
    pair = unit(group("prefill", tp=4), group("decode", tp=2))
    near = link(cluster(2, 8), pair, 1000, within_node=True)
    assert near.bytes_per_second == pytest.approx(2 * 100e9)
    far = link(cluster(2, 8), pair, 1000, within_node=False)
    assert far.bytes_per_second == pytest.approx(2 * 1e9)  # 8 GB/s over 8 devices
    assert link_limit(cluster(2, 8), pair, 1e9, within_node=False) == pytest.approx(2.0)


def test_wrong_clusters_are_refused():
    for option, fields in (
        ("--nodes", {"nodes": 0, "devices": 1}),
        ("--gpus-per-node", {"nodes": 1, "devices": 0}),
        ("--inter-node", {"nodes": 1, "devices": 1, "inter_node": 0.0}),
    ):
        with pytest.raises(ConfigError, match=option):
            cluster(**fields)


MODEL = FittedModel(
    prefill=(Regime(constant=0.1, per_prompt_token=1e-3),),
    decode=(Regime(constant=0.02, per_decode=1e-3),),
    mixed=(Regime(constant=0.1, per_prompt_token=1e-3, per_decode=1e-3),),
)
LENGTHS = [Lengths(100, 21)]


def test_the_bound_of_decode_is_the_largest_batch_that_memory_and_tpot_allow():
    """110 tokens a sequence; a step of B takes 20 + B ms, and a request 20 of them."""
    roomy = Build(MODEL, 110 * 1000)
    assert bounds.decode_limit(roomy, 1, LENGTHS, 0.03) == pytest.approx(10 / 0.03 / 20, rel=0.05)
    tight = Build(MODEL, 110 * 5)
    assert bounds.decode_limit(tight, 1, LENGTHS, 0.03) == pytest.approx(5 / 0.025 / 20)
    assert bounds.decode_limit(roomy, 1, LENGTHS, 0.02) == 0  # not even one alone


def test_the_bound_of_prefill_batches_prompts_and_fills_all_stages():
    """32 prompts take 0.1 + 3.2 s."""
    assert bounds.prefill_limit(Build(MODEL, 10**6), 2, LENGTHS) == pytest.approx(2 * 32 / 3.3)


def test_the_saturating_batch_reaches_nine_tenths_of_the_best_speed():
    """n tokens take 0.1 + n ms: 4096 do 976 tokens/s; 1024 do 911, 512 do 837."""
    assert bounds.saturating_tokens(MODEL) == 1024
