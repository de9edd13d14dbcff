"""At load: does the model give the same logits through our attention as through its own?

Catches what no list of known trouble can: a model whose positions, masks or attention take a
way past packed input would otherwise be served with fluent nonsense.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from staffel.model import hook
from staffel.model.attention import PackedStep
from staffel.model.attention_cpu import CpuAttention
from staffel.model.cache import PagedCache
from staffel.model.loader import CausalLM, Refused

_STEPS = ([(0, 5), (0, 3)], [(5, 9), (3, 5)], [(9, 10), (5, 6)])
"""Of each of two sequences, the positions from and to of a first chunk, a second, and a token."""
_BLOCK_SIZE = 4
_TABLES = np.array([[4, 1, 3], [2, 0, 0]])
_BLOCKS = 5
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.05}
"""Root mean square of the difference, as a share of that of the logits' spread. Wrong attention
gives about 1; what is allowed is rounding, which may flip experts of a mixture."""


@torch.inference_mode()
def check(model: CausalLM) -> None:
    """Raise Refused (a ConfigError) where the two differ beyond rounding."""
    sequences = [_ids(model, stop) for _, stop in _STEPS[-1]]
    ours = _through_ours(model, sequences)
    own = _through_its_own(model, sequences)
    worst = max(_difference(a, b) for a, b in zip(ours, own, strict=True))
    # Negated, so that a NaN is refused too.
    if not worst <= _TOLERANCE[model.net.dtype]:
        raise Refused(
            model.model_type,
            f"through paged attention the logits differ from transformers' own "
            f"(by {worst:.2g} of their spread)",
        )


def _ids(model: CausalLM, length: int) -> np.ndarray:
    """Some tokens, spread over the vocabulary."""
    return (np.arange(1, length + 1) * 7919 + length) % model.vocab_size


def _through_ours(model: CausalLM, sequences: list[np.ndarray]) -> list[Tensor]:
    """Logits [length, vocab] of each sequence, computed packed, in three steps."""
    attention = CpuAttention(_small_cache(model))
    hook.connect((layer.module for layer in model.layers), attention)
    parts: list[list[Tensor]] = [[] for _ in sequences]
    for spans in _STEPS:
        starts, stops = np.array(spans).T
        step = PackedStep(_TABLES, starts, stops - starts)
        attention.begin(step)
        ids = np.concatenate([s[a:b] for s, (a, b) in zip(sequences, spans, strict=True)])
        logits = model.logits(ids, step.positions, np.arange(len(ids)))
        for part, rows in zip(parts, logits.split(step.counts.tolist()), strict=True):
            part.append(rows)
    hook.disconnect(model.net)
    return [torch.cat(part) for part in parts]


def _small_cache(model: CausalLM) -> PagedCache:
    kv_heads, k_width, v_width = model.kv_shape
    shape = (_BLOCKS, len(model.layers), _BLOCK_SIZE, kv_heads)
    k, v = (torch.zeros(*shape, width, dtype=model.net.dtype) for width in (k_width, v_width))
    return PagedCache.over(k, v)


def _through_its_own(model: CausalLM, sequences: list[np.ndarray]) -> list[Tensor]:
    model.net.set_attn_implementation("eager")
    try:
        return [model.logits(ids, np.arange(len(ids)), np.arange(len(ids))) for ids in sequences]
    finally:
        model.net.set_attn_implementation(hook.NAME)


def _difference(a: Tensor, b: Tensor) -> float:
    """The worst position's root mean square difference, over that of the logits' spread."""
    a, b = a.float(), b.float()
    spread = (b - b.mean(-1, keepdim=True)).square().mean(-1).sqrt()
    return float(((a - b).square().mean(-1).sqrt() / spread).max())
