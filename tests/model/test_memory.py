"""What is left of a GPU for the KV cache, and the steps that it is measured with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from staffel.config import ConfigError
from staffel.model import loader
from staffel.model.executor import GpuUse
from staffel.model.memory import BESIDE, Need, Share, Sizes, left_for_kv, try_decodes, try_prompts
from tests.model.families import MAX_LEN, make_model

GIB = 1 << 30
NEED = Need(weights=16 * GIB, step=2 * GIB, graphs=GIB)


def test_kv_gets_what_weights_steps_and_the_driver_leave() -> None:
    assert left_for_kv(Share(80 * GIB, 0.9, 1), NEED) == 72 * GIB - 19 * GIB - BESIDE


def test_instances_on_one_gpu_share_it() -> None:
    assert left_for_kv(Share(80 * GIB, 0.9, 2), NEED) == 36 * GIB - 19 * GIB - BESIDE


def test_too_little_says_what_takes_it() -> None:
    with pytest.raises(
        ConfigError, match=r"--gpu-memory-utilization: 0.5 .* weights take 16.0 GiB"
    ):
        left_for_kv(Share(24 * GIB, 0.5, 1), NEED)


@pytest.mark.parametrize(
    ("instances", "gpus", "indices"), [(2, 1, [0, 0]), (2, 2, [0, 1]), (3, 2, [0, 1, 0])]
)
def test_instances_are_dealt_out_to_gpus(instances: int, gpus: int, indices: list[int]) -> None:
    uses = [GpuUse(number, instances) for number in range(instances)]
    assert [use.index(gpus) for use in uses] == indices


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_trial_steps_keep_to_the_model_and_leave_no_trace(tmp_path: Path, family: str) -> None:
    """gpt2 looks positions up, and has none beyond its length."""
    path = make_model(family, tmp_path)
    model = loader.load(path, dtype=torch.float32, max_model_len=MAX_LEN)
    sizes = Sizes(chunk_tokens=2 * MAX_LEN + 5, sequences=7, max_model_len=MAX_LEN, block_size=4)
    try_prompts(model, sizes, sizes.chunk_tokens)
    try_decodes(model, sizes, sizes.sequences)
    assert not any("staffel_attend" in module.__dict__ for module in model.net.modules())
