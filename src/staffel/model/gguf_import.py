"""A Llama-family GGUF file as a Hugging Face folder: weights, config, tokenizer.

Works without torch. Quantised weights are unpacked to float32, which is exact: a quantised value
is a small integer times a scale plus an offset, computed in float32 by every reader of the format.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

Meta = dict[str, Any]
Weights = dict[str, NDArray[np.float32]]

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL = 3
"""GGUF's token type of special tokens."""


def convert(gguf: Path, folder: Path) -> None:
    """Write the model in `gguf` into the existing `folder`.

    Raises:
        ValueError: another architecture than llama, or another tokenizer than SmolLM's.
    """
    reader = GGUFReader(gguf)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    _require(meta, "general.architecture", "llama")
    _require(meta, "tokenizer.ggml.model", "gpt2")
    _require(meta, "tokenizer.ggml.pre", "smollm")
    weights = _weights(reader, meta)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", _config(meta, tied="lm_head.weight" not in weights))
    _write_json(folder / "generation_config.json", _special_ids(meta))
    _tokenizer(meta).save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(meta))


def _require(meta: Meta, key: str, value: str) -> None:
    if meta.get(key) != value:
        raise ValueError(f"{key} is {meta.get(key)!r}; only {value!r} can be converted")


def _write_json(file: Path, value: Meta) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n")


# ---- weights


def _weights(reader: GGUFReader, meta: Meta) -> Weights:
    heads = {
        "attn_q": meta["llama.attention.head_count"],
        "attn_k": meta["llama.attention.head_count_kv"],
    }
    weights = {}
    for tensor in reader.tensors:
        value = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        kind = tensor.name.split(".")[-2]
        if kind in heads:
            value = _unpermute(value, heads[kind])
        weights[_hf_name(tensor.name)] = np.ascontiguousarray(value)
    return weights


def _hf_name(name: str) -> str:
    """blk.7.attn_q.weight is model.layers.7.self_attn.q_proj.weight."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    _, layer, kind, suffix = name.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[kind]}.{suffix}"


def _unpermute(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rotary pairs as Hugging Face has them: GGUF puts the two of a pair beside each other,
    transformers half a head apart. `weight` is [heads * width, inputs]."""
    paired = weight.reshape(heads, -1, 2, weight.shape[1])
    return paired.swapaxes(1, 2).reshape(weight.shape)


# ---- config


def _config(meta: Meta, *, tied: bool) -> Meta:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": meta["llama.attention.head_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": meta["llama.rope.dimension_count"],
        "max_position_embeddings": meta["llama.context_length"],
        "rms_norm_eps": meta["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": meta["llama.rope.freq_base"],
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "dtype": "float32",
        **_special_ids(meta),
    }


def _special_ids(meta: Meta) -> Meta:
    return {
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
    }


# ---- tokenizer


def _tokenizer(meta: Meta) -> Tokenizer:
    """SmolLM's byte-level BPE: every digit alone, then GPT-2's split."""
    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    vocab = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = meta["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    return tokenizer


def _tokenizer_config(meta: Meta) -> Meta:
    tokens = meta["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[meta["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[meta["tokenizer.ggml.eos_token_id"]],
        "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
        "pad_token": tokens[meta["tokenizer.ggml.padding_token_id"]],
        "model_max_length": meta["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": meta["tokenizer.chat_template"],
    }
