"""At load: does what serves give the same logits as the model as its authors wrote it?

Catches what no list of known trouble can: a model whose positions, masks or attention take a
way past packed input, or that the kernels compute wrongly, would otherwise be served with fluent
nonsense.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from staffel.config import Quantization
from staffel.model import hook
from staffel.model.attention import PackedStep
from staffel.model.attention_kernels import best
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


_QUANTIZED = 0.5
"""The same for 8 bits, and for the median position instead of the worst: a first token can be far
off, since its activations often are huge."""


@torch.inference_mode()
def reference(model: CausalLM) -> list[Tensor]:
    """What `check` compares with: the untouched model's logits, through its own attention."""
    model.net.set_attn_implementation("eager")
    try:
        return [
            model.logits(ids, np.arange(len(ids)), np.arange(len(ids))) for ids in _sequences(model)
        ]
    finally:
        model.net.set_attn_implementation(hook.NAME)


@torch.inference_mode()
def check(
    model: CausalLM,
    expected: list[Tensor],
    quantization: Quantization | None = None,
) -> None:
    """Raise Refused (a ConfigError) where `model`, as it serves, differs beyond rounding.

    `expected` is the `reference` of the model as it was loaded.
    """
    pairs = zip(_through_ours(model), expected, strict=True)
    differences = torch.cat([_differences(ours, own) for ours, own in pairs])
    if quantization is None:
        difference, bound = differences.max().item(), _TOLERANCE[model.net.dtype]
    else:
        difference, bound = differences.median().item(), _QUANTIZED
    # Negated, so that a NaN is refused too.
    if not difference <= bound:
        raise Refused(
            model.model_type,
            f"as it would be served the logits differ from transformers' own "
            f"(by {difference:.2g} of their spread)",
        )


def _sequences(model: CausalLM) -> list[np.ndarray]:
    return [_ids(model, stop) for _, stop in _STEPS[-1]]


def _ids(model: CausalLM, length: int) -> np.ndarray:
    """Some tokens, spread over the vocabulary."""
    return (np.arange(1, length + 1) * 7919 + length) % model.vocab_size


def _through_ours(model: CausalLM) -> list[Tensor]:
    """Logits [length, vocab] of each sequence, computed packed, in three steps."""
    cache = PagedCache.scratch(
        model.kv_shape, len(model.layers), _BLOCKS, _BLOCK_SIZE, like=model.net
    )
    sequences, attention = _sequences(model), best(cache)
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


def _differences(a: Tensor, b: Tensor) -> Tensor:
    """Each position's root mean square difference, over that of the logits' spread."""
    a, b = a.float(), b.float()
    spread = (b - b.mean(-1, keepdim=True)).square().mean(-1).sqrt()
    return (a - b).square().mean(-1).sqrt() / spread
