"""Shapes count what the models' authors state, and refuse what they cannot count."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from staffel.config import ConfigError
from staffel.latency.shape import ModelShape, shape_of

DEEPSEEK_V3 = {
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "vocab_size": 129280,
    "tie_word_embeddings": False,
}
MIXTRAL_8X7B = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "hidden_act": "silu",
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}
GPT2 = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257}
GEMMA_LIKE = {
    "num_hidden_layers": 6,
    "hidden_size": 640,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "intermediate_size": 2048,
    "vocab_size": 1000,
    "sliding_window": 512,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
}


@pytest.mark.parametrize(
    ("name", "billions"),
    [("opt-13b", 12.85), ("opt-66b", 65.7), ("opt-175b", 174.6), ("llama-3.1-70b", 70.55)],
)
def test_built_in_models_have_the_weights_of_their_papers(name: str, billions: float) -> None:
    assert shape_of(name).weights / 1e9 == pytest.approx(billions, rel=2e-3)


@pytest.mark.parametrize(
    ("config", "total", "active"),
    [(DEEPSEEK_V3, 671.0, 37.0), (MIXTRAL_8X7B, 46.7, 12.9), (GPT2, 0.124, 0.124)],
)
def test_configs_give_total_and_active_weights(
    config: dict[str, object], total: float, active: float
) -> None:
    shape = ModelShape.from_config(config)
    assert shape.weights / 1e9 == pytest.approx(total, rel=0.01)
    assert shape.active_weights(1) / 1e9 == pytest.approx(active, rel=0.02)


def test_kv_of_one_token() -> None:
    assert shape_of("opt-175b").kv_bytes_per_token() == 2 * 96 * 12288 * 2
    assert shape_of("llama-3.1-8b").kv_bytes_per_token() == 2 * 32 * 8 * 128 * 2


def test_mla_caches_the_latent_or_many_times_as_much() -> None:
    compressed = ModelShape.from_config(DEEPSEEK_V3)
    expanded = ModelShape.from_config(DEEPSEEK_V3, mla="expanded")
    assert compressed.kv_bytes_per_token() == 61 * 576 * 2
    assert expanded.kv_bytes_per_token() == 61 * 128 * (192 + 128) * 2
    assert compressed.weights == expanded.weights


def test_a_larger_batch_touches_more_experts_up_to_all_of_them() -> None:
    shape = ModelShape.from_config(DEEPSEEK_V3)
    assert shape.active_experts(1) == pytest.approx(8)
    assert 8 < shape.active_experts(8) < 64
    assert shape.active_experts(4096) == pytest.approx(256)


def test_sliding_windows_are_counted_by_layer() -> None:
    shape = ModelShape.from_config(GEMMA_LIKE)
    assert (shape.window, shape.window_layers) == (512, 5)
    assert shape.embedding_weights == 0  # tied


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"layer_types": ["linear_attention"]}, "linear_attention"),
        ({"index_topk": 2048}, "index_topk"),
        ({"vocab_size": None}, "vocab_size"),
        ({"decoder_sparse_step": 2}, "every other layer"),
    ],
)
def test_what_the_counts_do_not_cover_is_refused(more: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ModelShape.from_config({**MIXTRAL_8X7B, **more})


def test_a_model_is_a_name_or_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL_8X7B))
    assert shape_of(str(tmp_path)) == ModelShape.from_config(MIXTRAL_8X7B)
    assert shape_of("facebook/OPT-66B") == shape_of("opt-66b")
    with pytest.raises(ConfigError, match="opt-13b"):
        shape_of("no-such-model")
