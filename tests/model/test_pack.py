"""The kernels in a model: what they take over, what they leave alone, what stays the same."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from staffel.config import ConfigError, ModelSpec
from staffel.kernels import elementwise, library
from staffel.model import fuse, loader, pack, selfcheck
from staffel.model.executor import Executor
from staffel.model.loader import CausalLM
from staffel.model.packed import (
    GatedMlp,
    PackedEmbedding,
    PackedLinear,
    RmsNorm,
    SharedLinear,
    SharedProduct,
    make_weight,
)
from tests.model.families import MAX_LEN, make_model

pytestmark = pytest.mark.skipif(library.level() is None, reason="no kernels")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(3)


def packed(path: Path, quantization: str | None = None) -> CausalLM:
    """Packed, and checked against what it was."""
    model = loader.load(path, dtype=torch.float32, max_model_len=MAX_LEN)
    expected = selfcheck.reference(model)
    pack.pack_model(model, path, quantization)
    selfcheck.check(model, expected, quantization)
    return model


def count(model: CausalLM, kind: type[nn.Module]) -> int:
    return sum(type(module) is kind for module in model.net.modules())


# ---- what is taken over


@pytest.mark.parametrize("tied", [False, True])
def test_a_llama_is_packed_whole(tmp_path: Path, tied: bool) -> None:
    model = packed(make_model("llama", tmp_path, tie_word_embeddings=tied))
    assert count(model, nn.Linear) == 0
    assert count(model, SharedLinear) == 6  # q, k, v of two layers
    assert count(model, GatedMlp) == 2
    assert count(model, RmsNorm) == 5
    assert count(model, PackedEmbedding) == tied
    assert all("forward" in layer.module.__dict__ for layer in model.layers)  # rotary


def test_an_embedding_that_scales_shares_the_weights_too(tmp_path: Path) -> None:
    model = packed(make_model("gemma3_text", tmp_path, tie_word_embeddings=True))
    assert isinstance(model.net.get_input_embeddings(), PackedEmbedding)


def test_layers_with_their_weights_the_other_way_round(tmp_path: Path) -> None:
    model = packed(make_model("gpt2", tmp_path))
    assert count(model, PackedLinear) == 9


def test_no_second_copy_of_the_weights_stays(tmp_path: Path) -> None:
    model = packed(make_model("llama", tmp_path, tie_word_embeddings=True))
    assert sum(parameter.numel() for parameter in model.net.parameters()) == 0


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "gpt_neox", "phi3"])
def test_in_8_bits_the_logits_are_near(family: str, tmp_path: Path) -> None:
    packed(make_model(family, tmp_path), "int8")


# ---- what is left alone


def test_an_activation_that_no_kernel_knows(tmp_path: Path) -> None:
    model = packed(make_model("llama", tmp_path, hidden_act="relu"))
    assert count(model, GatedMlp) == 0
    assert count(model, SharedLinear) == 10


def test_a_rotary_embedding_of_another_kind(tmp_path: Path) -> None:
    model = packed(make_model("glm4", tmp_path))  # its pairs are neighbours
    assert not any("forward" in layer.module.__dict__ for layer in model.layers)


class OddRMSNorm(nn.Module):
    """Has the parts, and another formula."""

    eps = 1e-6

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8) + 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight.exp()


def test_a_norm_with_another_formula() -> None:
    with torch.inference_mode():
        assert fuse.rms_norm(OddRMSNorm(), elementwise) is None


class OffsetRMSNorm(nn.Module):
    """With weights next to which 1 is lost in bfloat16's rounding of the result."""

    eps = 1e-6

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((8,), 100.0, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (normed * (1 + self.weight.float())).to(x.dtype)


def test_a_norm_in_half_width_is_judged_in_full() -> None:
    with torch.inference_mode():
        norm = fuse.rms_norm(OffsetRMSNorm(), elementwise)
    assert norm is not None
    assert norm._offset == 1


class Mlp(nn.Module):
    def __init__(self, extra: float) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 6), nn.Linear(8, 6), nn.Linear(6, 8)
        self.extra = extra

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * (self.up(x) + self.extra))


@pytest.mark.parametrize(("extra", "found"), [(0.0, "silu"), (1.0, None)])
def test_an_mlp_with_another_formula(extra: float, found: str | None) -> None:
    mlp = Mlp(extra)
    with torch.inference_mode():
        assert fuse.gate_of(mlp, [mlp.gate, mlp.up], mlp.down, 8, elementwise) == found


# ---- layers that share an input


@pytest.fixture
def shared() -> tuple[list[nn.Linear], list[SharedLinear], SharedProduct]:
    own = [nn.Linear(8, size, bias=False) for size in (5, 3)]
    matrix = torch.cat([layer.weight.detach() for layer in own])
    product = SharedProduct(make_weight(matrix, None), [5, 3], None)
    return own, [SharedLinear(product, index) for index in range(2)], product


def test_each_takes_its_part_of_whatever_it_is_given(shared) -> None:
    """In any order of calls: no part of another input is ever handed out."""
    own, ours, _ = shared
    a, b = torch.randn(2, 1, 4, 8)
    for index, x in [(0, a), (1, a), (1, a), (0, b), (1, a), (0, a), (0, a), (1, b), (0, b)]:
        torch.testing.assert_close(ours[index](x), own[index](x).detach())


def test_nothing_is_kept_when_all_have_theirs(shared) -> None:
    _, ours, product = shared
    x = torch.randn(2, 8)
    for layer in ours:
        layer(x)
    assert product._input is None
    assert not product._parts


class Reshaping(nn.Module):
    """Reshapes what its layers give: in a way that needs rows without gaps, or another."""

    device = torch.device("cpu")

    def __init__(self, layers: list[SharedLinear], *, flat: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._flat = flat

    def forward(self, input_ids: Tensor, **_: object) -> SimpleNamespace:
        x = input_ids[..., None].expand(-1, -1, 8).float()
        parts = [layer(x) for layer in self.layers]
        shape = (-1,) if self._flat else (1, 3, -1, 1)
        return SimpleNamespace(logits=[part.view(shape) for part in parts])


@pytest.mark.parametrize("flat", [True, False])
def test_parts_are_copied_only_where_a_model_needs_them_without_gaps(shared, flat: bool) -> None:
    _, ours, product = shared
    net = Reshaping(ours, flat=flat)
    pack._try_views(net)
    assert product.copies == flat
    net(torch.arange(3)[None])


# ---- refusals


@pytest.mark.parametrize(("quantization", "factor"), [(None, 1.01), ("int8", -1.0)])
def test_kernels_that_compute_wrongly_are_noticed(
    quantization: str | None, factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_model("llama", tmp_path)
    forward = PackedLinear.forward
    monkeypatch.setattr(PackedLinear, "forward", lambda self, x: forward(self, x) * factor)
    spec = ModelSpec.load(path, name="llama")
    with pytest.raises(ConfigError, match="logits differ"):
        Executor(spec, kv_bytes=1 << 24, quantization=quantization)


def test_8_bits_without_kernels_or_in_another_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ModelSpec.load(make_model("llama", tmp_path), name="llama")
    with pytest.raises(ConfigError, match="--quantization: int8 needs --dtype float32"):
        Executor(spec, kv_bytes=1 << 24, quantization="int8", dtype="bfloat16")
    monkeypatch.setattr(library, "level", lambda: None)
    with pytest.raises(ConfigError, match=r"--quantization: int8 needs .* CPU kernels"):
        Executor(spec, kv_bytes=1 << 24, quantization="int8")
