"""Attention in C passes the tests of attention by torch, at each instruction set."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from staffel.config import ConfigError
from staffel.kernels import library
from staffel.model import attention_kernels
from staffel.model.attention_cpu import CpuAttention
from staffel.model.attention_kernels import KernelAttention
from staffel.model.cache import PagedCache
from tests.kernels.test_attention import LEVELS, use
from tests.model import test_attention
from tests.model.test_attention import (  # noqa: F401
    test_a_row_sees_keys_that_another_row_of_the_batch_writes,
    test_each_used_block_counts,
    test_layers_keep_apart,
    test_mixed_batches_equal_the_formula,
)


@pytest.fixture(autouse=True, params=LEVELS)
def in_c(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(test_attention, "CpuAttention", KernelAttention)
    with use(request.param):
        yield


def empty_cache(dtype: torch.dtype) -> PagedCache:
    return PagedCache.over(*torch.zeros(2, 3, 1, 4, 2, 8, dtype=dtype))


def test_float32_goes_to_c_and_the_rest_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(attention_kernels.best(empty_cache(torch.float32)), KernelAttention)
    assert isinstance(attention_kernels.best(empty_cache(torch.bfloat16)), CpuAttention)
    with monkeypatch.context() as patch:
        patch.setattr(library, "level", lambda: None)
        assert isinstance(attention_kernels.best(empty_cache(torch.float32)), CpuAttention)


def test_another_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cache\.k: .* float32, not torch\.bfloat16"):
        KernelAttention(empty_cache(torch.bfloat16))
