"""The shape of a model, as far as time and memory depend on it; read from a Hugging Face config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from staffel.config import ConfigError

Mla = Literal["compressed", "expanded"]


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of weights and of cached values; bytes are those times a dtype's width."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    """Heads of the cache that tensor parallelism can share out; 1 where MLA caches one latent."""
    qk_dim: int
    """Width of a query and a key, per head."""
    v_dim: int
    kv_values: int
    """Cached values per token and layer, of all heads."""
    decode_dim: int
    """Multiply-adds per head for a (decoded token, key seen) pair."""
    attention_weights: int
    """Per layer."""
    mlp_weights: int
    """Per layer with a dense MLP."""
    moe_layers: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_weights: int = 0
    """Per expert and layer."""
    shared_weights: int = 0
    """Per layer with experts: shared experts and the router."""
    head_weights: int
    """Of the output projection."""
    embedding_weights: int
    """Kept in memory beside the output projection, looked up and not multiplied."""
    qk_norm: bool = False
    """Whether queries and keys are normalised, by kernels of their own."""
    window: int | None = None
    """Keys that a token sees in layers with sliding windows."""
    window_layers: int = 0

    @property
    def dense_weights(self) -> int:
        """All that every token is multiplied with, but for the output projection."""
        dense_layers = self.layers - self.moe_layers
        per_kind = dense_layers * self.mlp_weights + self.moe_layers * self.shared_weights
        return self.layers * self.attention_weights + per_kind

    @property
    def all_expert_weights(self) -> int:
        return self.moe_layers * self.experts * self.expert_weights

    @property
    def weights(self) -> int:
        """All of them."""
        ends = self.head_weights + self.embedding_weights
        return self.dense_weights + self.all_expert_weights + ends

    def kv_bytes_per_token(self, bytes_per_value: float = 2) -> int:
        """Of all layers."""
        return int(self.layers * self.kv_values * bytes_per_value)

    def active_experts(self, tokens: int) -> float:
        """Expected distinct experts of a layer that `tokens` tokens touch, routed evenly.

        Each token picks k of E, so an expert is left out by all of them with (1 - k/E)^tokens.
        """
        if not self.experts:
            return 0.0
        return self.experts * (1 - (1 - self.experts_per_token / self.experts) ** tokens)

    def active_weights(self, tokens: int) -> float:
        """Weights that a batch of `tokens` tokens reads."""
        experts = self.moe_layers * self.active_experts(tokens) * self.expert_weights
        return self.dense_weights + experts + self.head_weights

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, mla: Mla = "compressed") -> ModelShape:
        """From the content of a config.json.

        Args:
            mla: how a DeepSeek model's cache is kept: `compressed` is the latent, as vLLM and
                SGLang keep it; `expanded` the keys and values of all heads, as Staffel does.

        Raises:
            ConfigError: a field is missing, or layers are of a kind that the counts do not cover.
        """
        text = {**config, **(config.get("text_config") or {})}
        _refuse_unknown(text)
        attention = _mla_attention(text, mla) if text.get("kv_lora_rank") else _attention(text)
        return cls(**attention, **_mlp(text), **_ends(text), **_windows(text))

    @classmethod
    def load(cls, folder: Path, *, mla: Mla = "compressed") -> ModelShape:
        """From a model folder. Raises ConfigError where there is no readable config.json."""
        try:
            config = json.loads((folder / "config.json").read_text())
        except OSError as error:
            raise ConfigError(f"--model: {folder}/config.json: {error.strerror}") from None
        except ValueError as error:
            raise ConfigError(f"--model: {folder}/config.json is not JSON: {error}") from None
        return cls.from_config(config, mla=mla)


def shape_of(model: str, *, mla: Mla = "compressed") -> ModelShape:
    """A built-in shape by name ("opt-66b", "facebook/opt-66b"), else a model folder's.

    Raises:
        ConfigError: neither; lists the built-in names.
    """
    name = model.lower().rsplit("/", 1)[-1]
    if name in CONFIGS:
        return ModelShape.from_config(CONFIGS[name], mla=mla)
    if Path(model).is_dir():
        return ModelShape.load(Path(model), mla=mla)
    raise ConfigError(
        f"--model: {model!r} is no folder and not one of {', '.join(CONFIGS)}; "
        "give a folder with the model's config.json"
    )


_UNCOUNTED = (
    "attention_chunk_size",
    "attn_type_list",
    "block_configs",
    "hybrid_layer_pattern",
    "hybrid_override_pattern",
    "index_topk",
    "interleave_moe_layer_step",
    "layers_block_type",
    "mlp_only_layers",
    "moe_layers_enum",
    "multi_query",
    "num_kv_shared_layers",
    "state_size",
)
"""Fields of configs whose layers differ from each other, or attend, in ways not counted here."""


def _get(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    """The first of `names` that is there and set."""
    for name in names:
        if isinstance(config.get(name), int):
            return int(config[name])
    if default is None:
        raise ConfigError(f"--model: its config names no {' or '.join(names)}")
    return default


def _refuse_unknown(config: Mapping[str, Any]) -> None:
    kinds = set(config.get("layer_types") or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise ConfigError(f"--model: layers of kind {', '.join(sorted(kinds))} are not modelled")
    for field in _UNCOUNTED:
        if config.get(field):
            raise ConfigError(f"--model: its config has {field}, which is not modelled")
    if config.get("decoder_sparse_step", 1) != 1:
        raise ConfigError("--model: experts in every other layer are not modelled")


def _sizes(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """(layers, hidden, heads)."""
    return (
        _get(config, "num_hidden_layers", "n_layer", "n_layers"),
        _get(config, "hidden_size", "n_embd", "d_model"),
        _get(config, "num_attention_heads", "n_head", "n_heads"),
    )


def _attention(config: Mapping[str, Any]) -> dict[str, Any]:
    layers, hidden, heads = _sizes(config)
    kv_heads = _get(config, "num_key_value_heads", default=heads)
    dim = _get(config, "head_dim", default=hidden // heads)
    return {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "qk_dim": dim,
        "v_dim": dim,
        "kv_values": 2 * kv_heads * dim,
        "decode_dim": 2 * dim,
        "attention_weights": 2 * hidden * heads * dim + 2 * hidden * kv_heads * dim,
        "qk_norm": bool(config.get("use_qk_norm"))
        or str(config.get("model_type")).startswith(("qwen3", "gemma3", "olmo2")),
    }


def _mla_attention(config: Mapping[str, Any], mla: Mla) -> dict[str, Any]:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""
    layers, hidden, heads = _sizes(config)
    latent, rope = _get(config, "kv_lora_rank"), _get(config, "qk_rope_head_dim")
    nope, v_dim = _get(config, "qk_nope_head_dim"), _get(config, "v_head_dim")
    rank = _get(config, "q_lora_rank", default=0)
    qk_dim = nope + rope
    query = rank * (hidden + heads * qk_dim) if rank else hidden * heads * qk_dim
    key_value = hidden * (latent + rope) + latent * heads * (nope + v_dim)
    compressed = mla == "compressed"
    return {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": 1 if compressed else heads,
        "qk_dim": qk_dim,
        "v_dim": v_dim,
        "kv_values": latent + rope if compressed else heads * (qk_dim + v_dim),
        "decode_dim": 2 * latent + rope if compressed else qk_dim + v_dim,
        "attention_weights": query + key_value + heads * v_dim * hidden,
    }


def _mlp(config: Mapping[str, Any]) -> dict[str, Any]:
    layers, hidden, _ = _sizes(config)
    width = _get(config, "intermediate_size", "ffn_dim", "n_inner", default=4 * hidden)
    matrices = 3 if _is_gated(config) else 2
    dense = {"mlp_weights": matrices * hidden * width}
    experts = _get(config, "num_local_experts", "n_routed_experts", "num_experts", default=0)
    if not experts:
        return dense
    expert_width = _get(config, "moe_intermediate_size", default=width)
    shared = _get(config, "n_shared_experts", default=0) * expert_width
    shared += _get(config, "shared_expert_intermediate_size", default=0)
    return {
        **dense,
        "moe_layers": layers - _get(config, "first_k_dense_replace", default=0),
        "experts": experts,
        "experts_per_token": _get(config, "num_experts_per_tok", "experts_per_token"),
        "expert_weights": 3 * hidden * expert_width,
        "shared_weights": 3 * hidden * shared + hidden * experts,
    }


def _is_gated(config: Mapping[str, Any]) -> bool:
    """Whether the MLP has a gate's matrix beside those up and down."""
    if config.get("model_type") in ("opt", "gpt2", "gpt_neox", "gptj", "phi", "starcoder2"):
        return False
    activation = config.get("hidden_act") or config.get("activation_function") or ""
    return activation not in ("relu", "gelu", "gelu_new", "gelu_fast")


def _ends(config: Mapping[str, Any]) -> dict[str, Any]:
    _, hidden, _ = _sizes(config)
    table = _get(config, "vocab_size") * hidden
    # transformers ties where a config says nothing
    tied = config.get("tie_word_embeddings", True)
    return {"head_weights": table, "embedding_weights": 0 if tied else table}


def _windows(config: Mapping[str, Any]) -> dict[str, Any]:
    window = config.get("sliding_window")
    if not window or config.get("use_sliding_window") is False:
        return {}
    kinds = config.get("layer_types")
    layers = kinds.count("sliding_attention") if kinds else _sizes(config)[0]
    return {"window": window, "window_layers": layers}


def _opt(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    """Sizes in table 1 of OPT (arXiv 2205.01068)."""
    return {
        "model_type": "opt",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "ffn_dim": 4 * hidden,
        "activation_function": "relu",
        "vocab_size": 50272,
    }


def _llama3(layers: int, hidden: int, heads: int, width: int) -> dict[str, Any]:
    """Sizes in table 3 of The Llama 3 Herd of Models (arXiv 2407.21783)."""
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "intermediate_size": width,
        "hidden_act": "silu",
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    }


CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "opt-13b": _opt(40, 5120, 40),
    "opt-30b": _opt(48, 7168, 56),
    "opt-66b": _opt(64, 9216, 72),
    "opt-175b": _opt(96, 12288, 96),
    "llama-3.1-8b": _llama3(32, 4096, 32, 14336),
    "llama-3.1-70b": _llama3(80, 8192, 64, 28672),
}
"""Models that are known by name."""
