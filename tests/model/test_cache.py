"""How many blocks a given memory holds."""

from __future__ import annotations

import pytest
import torch

from staffel.config import ConfigError
from staffel.model.cache import blocks_that_fit
from staffel.transfer import KvShape

SHAPE = KvShape(
    slots=4,
    num_blocks=0,
    layers=2,
    block_size=16,
    kv_heads=3,
    k_width=8,
    v_width=6,
    dtype=torch.float32,
)
BLOCK = 2 * 16 * 3 * (8 + 6) * 4


def test_blocks_fill_the_memory_given() -> None:
    assert SHAPE.block_bytes == BLOCK
    assert blocks_that_fit(10 * BLOCK, SHAPE, 160) == 10
    assert blocks_that_fit(11 * BLOCK - 1, SHAPE, 160) == 10


def test_too_little_for_one_sequence_names_the_option_and_the_need() -> None:
    with pytest.raises(ConfigError, match=f"--kv-memory.*--max-model-len 161.*{11 * BLOCK} bytes"):
        blocks_that_fit(11 * BLOCK - 1, SHAPE, 161)
