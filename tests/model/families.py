"""Small random models of every family that is served, and what transformers itself makes of them.

At transformers' default spread a tiny model predicts nine tokens of ten with no context at all,
and tied random embeddings make it repeat its input: such models would hide every fault.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto import CONFIG_MAPPING

VOCAB = 199
MAX_LEN = 192
STD = 0.3
TIE = 1e-4
"""Reference logits this close are a tie: either token is right."""

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": MAX_LEN,
    "initializer_range": STD,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
_SLIDING = {"sliding_window": 21, "layer_types": ["sliding_attention", "full_attention"]}

FAMILIES: dict[str, dict[str, object]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 21},
    "gemma2": {**_SLIDING, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0},
    "gemma3_text": {**_SLIDING, "query_pre_attn_scalar": 8},
    "phi3": {},
    "mixtral": _MOE,
    "qwen3_moe": {**_MOE, "moe_intermediate_size": 24, "decoder_sparse_step": 1},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": STD},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": MAX_LEN, "n_inner": 48},
    "gpt_oss": {**_MOE, **_SLIDING},
    "granite": {},
    "olmo2": {},
    "glm4": {"partial_rotary_factor": 0.5},
    "gpt_neox": {"num_key_value_heads": 4},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "head_dim": 8,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    },
}


def make_model(family: str, folder: Path, **changes: object) -> Path:
    """Save a small random model of that family (float32, the same each time); its folder."""
    options = {**_COMMON, **FAMILIES.get(family, {}), **changes}
    if options.get("eos_token_id") is not None:
        raise ValueError("families must not stop: leave eos_token_id None")
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**options)).float()
    randomise(model)
    path = folder / family
    model.save_pretrained(path)
    return path


def randomise(model: PreTrainedModel) -> None:
    """Spread what initialisers leave at zero: biases, and sinks of attention."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith((".sinks", "bias", "e_score_correction_bias")):
                weight.normal_(0.0, STD, generator=generator)


@dataclass(frozen=True)
class Reference:
    """transformers' greedy continuation of one prompt."""

    tokens: list[int]
    logits: Tensor
    """[n, vocab]: those that each token was chosen by."""

    @property
    def margins(self) -> list[float]:
        """By how much each token beat the next best."""
        best = self.logits.topk(2).values
        return (best[:, 0] - best[:, 1]).tolist()

    def agrees(self, tokens: list[int]) -> bool:
        """Whether `tokens` are these, up to the first tie (what follows a tie may differ)."""
        for ours, theirs, margin in zip(tokens, self.tokens, self.margins, strict=True):
            if ours != theirs:
                return margin < TIE
        return True


def reference(path: Path, prompts: list[list[int]], n: int) -> list[Reference]:
    """`n` greedy tokens after each prompt, by transformers' own `generate`, one at a time."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return [_generate(model, prompt, n) for prompt in prompts]


def _generate(model: PreTrainedModel, prompt: list[int], n: int) -> Reference:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        # Without a mask, prompt tokens that equal the padding token would be masked.
        attention_mask=torch.ones_like(ids),
        max_new_tokens=n,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return Reference(out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits))


def mixed_prompts(block_size: int, chunk: int, count: int = 40) -> list[list[int]]:
    """Prompts of the lengths at which block tables and chunks go wrong, and of some between."""
    edges = [1, 2, block_size - 1, block_size, block_size + 1, 2 * block_size]
    edges += [chunk - 1, chunk, chunk + 1, 2 * chunk + 3]
    generator = torch.Generator().manual_seed(3)
    lengths = edges + torch.randint(1, 3 * chunk, (count,), generator=generator).tolist()
    return [
        torch.randint(0, VOCAB, (length,), generator=generator).tolist()
        for length in lengths[:count]
    ]
