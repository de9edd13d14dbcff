"""Packed linear layers against float64, on every instruction set that this machine has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from staffel.config import ConfigError
from staffel.kernels import library, linear

SHAPES = [(192, 576), (1, 1), (7, 3), (48, 64), (49, 65), (95, 130), (50, 2500)]
ROWS = [0, 1, 2, 3, 4, 5, 7, 8, 9, 13, 32, 33, 64, 65, 200]


@pytest.fixture(params=library.LEVELS, autouse=True)
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The library of one instruction set is the one in use."""
    monkeypatch.setenv("STAFFEL_KERNELS", request.param)
    _forget()
    try:
        library.level()
    except ConfigError as error:
        pytest.skip(str(error))
    yield
    _forget()


def _forget() -> None:
    for cached in (library.level, library._library, linear._c):
        cached.cache_clear()


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = x.double() @ weight.double().T
    return y if bias is None else y + bias.double()


def assert_close(got: Tensor, want: Tensor) -> None:
    """Within fp32 rounding of sums of some thousand terms near 1."""
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=2e-4)


# ---- fp32


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_any_shape(n: int, k: int) -> None:
    x, weight = normal(ROWS[-1], k), normal(n, k, seed=1)
    packed, want = linear.pack(weight), exact(x, weight)
    for rows in ROWS:
        assert_close(linear.linear(x[:rows], packed, n), want[:rows])


@pytest.mark.parametrize("rows", [1, 6, 70])
def test_bias(rows: int) -> None:
    x, weight, bias = normal(rows, 2100), normal(70, 2100, seed=1), normal(70, seed=2)
    got = linear.linear(x, linear.pack(weight), 70, bias)
    assert_close(got, exact(x, weight, bias))


@pytest.mark.parametrize("rows", [1, 5, 70])
def test_rows_that_lie_apart(rows: int) -> None:
    wide, weight = normal(rows, 300), normal(50, 100, seed=1)
    x = wide[:, 37:137]
    assert_close(linear.linear(x, linear.pack(weight), 50), exact(x, weight))


def test_columns_that_lie_apart() -> None:
    x, weight = normal(100, 6).T, normal(50, 100, seed=1)
    assert_close(linear.linear(x, linear.pack(weight), 50), exact(x, weight))


def test_one_row_is_the_same_alone_and_in_a_batch() -> None:
    x, packed = normal(40, 576), linear.pack(normal(96, 576, seed=1))
    together = linear.linear(x, packed, 96)
    for i in range(40):
        alone = linear.linear(x[i : i + 1], packed, 96)
        torch.testing.assert_close(alone[0], together[i], rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("rows", [1, 8, 70])
@pytest.mark.parametrize("n", [20, 1000])
def test_threads(rows: int, n: int) -> None:
    x, weight = normal(rows, 512), normal(n, 512, seed=1)
    assert_close(linear.linear(x, linear.pack(weight), n), exact(x, weight))
    quantized = linear.quantize(weight)
    torch.testing.assert_close(
        linear.linear_int8(x, quantized).double(), as_int8(x, quantized), rtol=1e-5, atol=1e-4
    )


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_gather_gives_the_rows_that_were_packed(n: int, k: int) -> None:
    weight = normal(n, k)
    ids = torch.tensor([0, n - 1, n // 2, 0])
    assert torch.equal(linear.gather(linear.pack(weight), n, k, ids), weight[ids])


def test_gather_refuses_an_id_beyond_the_weight() -> None:
    packed = linear.pack(normal(50, 8))
    for id in (-1, 50):
        with pytest.raises(IndexError, match="49"):
            linear.gather(packed, 50, 8, torch.tensor([id]))


def test_pack_fills_what_it_is_given() -> None:
    weight, out = normal(50, 8), torch.full((linear.packed_numel(50, 8),), 9.0)
    assert linear.pack(weight, out).data_ptr() == out.data_ptr()
    assert torch.equal(out, linear.pack(weight))


def test_whole_panels_can_be_concatenated() -> None:
    x, first, second = normal(3, 20), normal(96, 20, seed=1), normal(50, 20, seed=2)
    packed = torch.cat([linear.pack(first), linear.pack(second)])
    assert_close(linear.linear(x, packed, 146), exact(x, torch.cat([first, second])))


def test_pack_refuses_room_of_another_size() -> None:
    with pytest.raises(ConfigError, match="out"):
        linear.pack(normal(50, 8), torch.empty(50 * 8))


def test_input_that_does_not_fit_is_refused() -> None:
    packed, quantized = linear.pack(normal(50, 8)), linear.quantize(normal(50, 8))
    with pytest.raises(ValueError, match="9 inputs"):
        linear.linear(normal(2, 9), packed, 50)
    with pytest.raises(ValueError, match="not 9"):
        linear.linear_int8(normal(2, 9), quantized)
    with pytest.raises(ValueError, match="float32"):
        linear.linear(normal(2, 8).double(), packed, 50)


# ---- int8


def as_int8(x: Tensor, weight: linear.Int8Weight) -> Tensor:
    """What int8 is to give, in float64: the rounding is the kernel's, the sums are exact."""
    most = x.abs().amax(1, keepdim=True)
    rounded = torch.round(x * torch.where(most > 0, 127 / most, 0))
    small = linear.gather_int8(weight, torch.arange(weight.n)).double()
    return (rounded.double() @ small.T) * (most.double() / 127)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_int8_any_shape(n: int, k: int) -> None:
    x, weight = normal(ROWS[-1], k), linear.quantize(normal(n, k, seed=1))
    want = as_int8(x, weight)
    for rows in ROWS:
        assert_close(linear.linear_int8(x[:rows], weight), want[:rows])


@pytest.mark.parametrize("rows", [1, 3, 70])
def test_int8_is_near_the_weight_that_it_was_made_of(rows: int) -> None:
    x, weight, bias = normal(rows, 600), normal(100, 600, seed=1), normal(100, seed=2)
    got = linear.linear_int8(x, linear.quantize(weight), bias).double()
    want = exact(x, weight, bias)
    assert (got - want).norm() < 0.02 * want.norm()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_int8_holds_the_largest_sums(rows: int, sign: int) -> None:
    k = linear.DEEPEST_INT8
    weight = linear.quantize(torch.full((50, k), 127.0))
    got = linear.linear_int8(torch.full((rows, k), sign * 127.0), weight)
    torch.testing.assert_close(got, torch.full((rows, 50), sign * 127.0 * 127 * k))


def test_int8_refuses_sums_that_could_overflow() -> None:
    with pytest.raises(ConfigError, match="65536 inputs"):
        linear.quantize(torch.zeros(1, linear.DEEPEST_INT8 + 1))


def test_int8_rows_that_lie_apart() -> None:
    x, weight = normal(5, 300)[:, 37:137], linear.quantize(normal(50, 100, seed=1))
    got = linear.linear_int8(x, weight)
    torch.testing.assert_close(got.double(), as_int8(x, weight), rtol=1e-5, atol=1e-4)


def test_int8_rows_of_zeros_give_the_bias() -> None:
    bias = normal(50)
    x = torch.tensor([0.0, 1e-40])[:, None].expand(2, 20)
    got = linear.linear_int8(x, linear.quantize(normal(50, 20)), bias)
    torch.testing.assert_close(got, bias.expand(2, 50))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_int8_does_not_hide_what_is_not_finite(bad: float) -> None:
    x = normal(3, 40)
    x[1, 33] = bad
    got = linear.linear_int8(x, linear.quantize(normal(50, 40, seed=1)))
    assert got[1].isnan().all()
    assert got[[0, 2]].isfinite().all()


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_int8_gather_is_within_half_a_step(n: int, k: int) -> None:
    weight, ids = normal(n, k), torch.tensor([0, n - 1, n // 2, 0])
    quantized = linear.quantize(weight)
    error = (linear.gather_int8(quantized, ids) - weight[ids]).abs()
    assert (error <= quantized.scales[ids][:, None] * 0.50001).all()


def test_int8_of_an_output_of_zeros_is_zero() -> None:
    weight = normal(50, 20)
    weight[7] = 0
    got = linear.linear_int8(normal(2, 20), linear.quantize(weight))
    assert torch.equal(got[:, 7], torch.zeros(2))
