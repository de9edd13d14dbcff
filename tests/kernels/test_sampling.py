"""The draw in C picks the very token that torch's formula picks, at each instruction set."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from staffel.kernels import library, sampling
from staffel.model import sampler
from tests.kernels.test_attention import LEVELS, use

pytestmark = pytest.mark.skipif(library.level() is None, reason="no kernels")


@pytest.fixture(autouse=True, params=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    torch.manual_seed(7)
    with use(request.param):
        sampling._draw.cache_clear()
        yield request.param
    sampling._draw.cache_clear()


def by_torch(row: Tensor, temperature: float, key: int) -> int:
    return int(sampler._place(row, torch.arange(len(row)), temperature, key))


@pytest.mark.parametrize("temperature", [1e-3, 0.3, 1.0, 20.0])
@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 1000, 49_152])
def test_the_same_token_as_by_the_formula(size: int, temperature: float) -> None:
    for key in range(20):
        row = torch.randn(size) * 4
        assert sampling.draw(row, temperature, key) == by_torch(row, temperature, key)


@pytest.mark.parametrize("spread", [0.0, 1e-3, 1e4])
def test_level_and_steep_rows(spread: float) -> None:
    for key in (0, -1, 2**63 - 1, -(2**63), 12345):
        row = torch.randn(5000) * spread
        assert sampling.draw(row, 1.0, key) == by_torch(row, 1.0, key)


def test_tokens_that_are_ruled_out_are_not_drawn() -> None:
    row = torch.full((500,), -torch.inf)
    row[[3, 130, 499]] = torch.tensor([1.0, 2.0, 3.0])
    drawn = {sampling.draw(row, 5.0, key) for key in range(100)}
    assert drawn == {3, 130, 499}


def test_what_torch_draws() -> None:
    assert sampling.can_draw(torch.zeros(10))
    assert not sampling.can_draw(torch.zeros(10, dtype=torch.float64))
    assert not sampling.can_draw(torch.zeros(20)[::2])
