"""The GPU's kernels between the products: right on odd sizes, and in whole models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="Triton comes with torch's CUDA builds")

from staffel.kernels.elementwise import Activation
from staffel.model import elementwise_triton, loader, pack, selfcheck
from staffel.model.loader import CausalLM
from staffel.model.packed import GatedMlp, RmsNorm, SharedLinear
from tests.kernels.test_elementwise import ACTIVATIONS, strided
from tests.model.families import MAX_LEN, make_model

WIDTHS = [1, 7, 64, 1100]
CLOSE = {
    torch.float32: {"rtol": 2e-6, "atol": 1e-6},
    torch.bfloat16: {"rtol": 8e-3, "atol": 1e-6},
    torch.float16: {"rtol": 1e-3, "atol": 1e-5},
}
KINDS = list(CLOSE)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm(width: int, kind: torch.dtype) -> None:
    x, weight = strided(5, width, 3).to(kind), torch.randn(width).to(kind)
    wide = x.double()
    expected = (
        wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * (weight + 1).double()
    )
    found = elementwise_triton.rms_norm(x, (weight + 1), 1e-5)
    torch.testing.assert_close(found.double(), expected, **CLOSE[kind])
    offset = elementwise_triton.rms_norm(x, weight, 1e-5, 1.0)
    if kind == torch.float32:
        torch.testing.assert_close(offset, found, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("width", WIDTHS)
def test_gated(width: int, activation: Activation, kind: torch.dtype) -> None:
    x = (strided(5, 2 * width, 3) * 4).to(kind)
    gate, up = x.double().chunk(2, -1)
    found = elementwise_triton.gated(x, activation)
    torch.testing.assert_close(found.double(), ACTIVATIONS[activation](gate) * up, **CLOSE[kind])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("heads", "width", "turned"), [(1, 8, 8), (5, 12, 12), (3, 64, 16)])
def test_rotary(heads: int, width: int, turned: int, kind: torch.dtype) -> None:
    # As models have it: heads beside each other in a token's row, with other things between.
    x = torch.randn(1, 6, heads * width + 4).to(kind)[..., : heads * width]
    x = x.view(1, 6, heads, width).transpose(1, 2)
    cos, sin = (torch.randn(1, 6, turned).to(kind) for _ in range(2))
    expected = x.double().clone()
    a, b = x[..., : turned // 2].double(), x[..., turned // 2 : turned].double()
    c, s = cos.double()[:, None], sin.double()[:, None]
    half = turned // 2
    expected[..., :half] = a * c[..., :half] - b * s[..., :half]
    expected[..., half:turned] = b * c[..., half:] + a * s[..., half:]
    found = elementwise_triton.rotary(x, cos, sin)
    loose = {"rtol": CLOSE[kind]["rtol"], "atol": 1e-6 if kind == torch.float32 else 1e-2}
    torch.testing.assert_close(found.double(), expected, **loose)
    assert found.transpose(1, 2).is_contiguous()


# ---- in models


def fused(path: Path) -> CausalLM:
    """Fused, and checked against what it was, with attention by torch."""
    model = loader.load(path, dtype=torch.float32, max_model_len=MAX_LEN)
    expected = selfcheck.reference(model)
    pack.fuse_model(model, elementwise_triton)
    selfcheck.check(model, expected)
    return model


def count(model: CausalLM, kind: type[nn.Module]) -> int:
    return sum(type(module) is kind for module in model.net.modules())


def test_a_llama_is_fused_whole(tmp_path: Path) -> None:
    model = fused(make_model("llama", tmp_path))
    assert count(model, SharedLinear) == 6  # q, k, v of two layers
    assert count(model, GatedMlp) == 2
    assert count(model, RmsNorm) == 5
    assert all("forward" in layer.module.__dict__ for layer in model.layers)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt2", "mixtral", "deepseek_v3", "phi3"])
def test_other_families_stay_right(tmp_path: Path, family: str) -> None:
    fused(make_model(family, tmp_path))


def test_joined_weights_are_kept_once(tmp_path: Path) -> None:
    path = make_model("llama", tmp_path)
    model = loader.load(path, dtype=torch.float32, max_model_len=MAX_LEN)
    query = model.layers[0].module.q_proj
    pack.fuse_model(model, elementwise_triton)
    matrix = model.layers[0].module.q_proj.product.weight.matrix
    assert query.weight.untyped_storage().data_ptr() == matrix.untyped_storage().data_ptr()


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_half_width_models_are_recognised(tmp_path: Path, kind: torch.dtype) -> None:
    model = loader.load(make_model("llama", tmp_path), dtype=kind, max_model_len=MAX_LEN)
    expected = selfcheck.reference(model)
    pack.fuse_model(model, elementwise_triton)
    selfcheck.check(model, expected)
    assert count(model, GatedMlp) == 2
    assert count(model, RmsNorm) == 5
    assert all("forward" in layer.module.__dict__ for layer in model.layers)
