"""How much of a GPU's memory is left for the KV cache, once the largest steps have been run.

An instance counts what it takes itself, and not what is free at the moment: others that start
beside it on the same GPU take theirs meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from staffel.config import ConfigError
from staffel.model import hook
from staffel.model.attention import PackedStep
from staffel.model.attention_kernels import best
from staffel.model.cache import PagedCache
from staffel.model.loader import CausalLM

BESIDE = 1 << 30
"""Bytes that a process takes besides torch's allocations: the driver's context, libraries and
their workspaces, compiled kernels."""


@dataclass(frozen=True)
class Share:
    """The part of a GPU's memory that an instance may use."""

    total: int
    """Bytes of the GPU."""
    utilization: float
    """Share of it for all instances on it."""
    instances: int
    """How many those are."""

    @property
    def bytes(self) -> int:
        return int(self.total * self.utilization) // self.instances


@dataclass(frozen=True)
class Need:
    """What an instance takes besides its KV cache. Bytes."""

    weights: int
    step: int
    """More than the weights, at the most, while a step of prompts is computed."""
    graphs: int
    """What captured decode steps keep for themselves."""

    @property
    def bytes(self) -> int:
        return self.weights + self.step + self.graphs + BESIDE


def left_for_kv(share: Share, need: Need) -> int:
    """Bytes. Raises ConfigError where nothing is."""
    left = share.bytes - need.bytes
    if left <= 0:
        raise ConfigError(
            f"--gpu-memory-utilization: {share.utilization:g} of the GPU's {_gib(share.total)} for "
            f"{share.instances} of the instances leaves no KV cache: weights take "
            f"{_gib(need.weights)}, steps {_gib(need.step)}, captured ones {_gib(need.graphs)}, "
            f"the driver {_gib(BESIDE)}; give more, or fewer --max-sequences or --chunk-tokens"
        )
    return left


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def need_of(
    model: CausalLM, *, chunk_tokens: int, max_sequences: int, block_size: int, graphs: bool
) -> Need:
    """Measured on the model's GPU, by steps of the largest sizes.

    Smaller ones follow, so that every kernel that a step may take is compiled by then.
    """
    device = model.net.device
    weights = torch.cuda.memory_allocated(device)
    prompts = _peak(lambda: try_step(model, 1, chunk_tokens, block_size), device) - weights
    decodes = _peak(lambda: try_step(model, max_sequences, 1, block_size), device) - weights
    for size in _halves(max_sequences):
        try_step(model, size, 1, block_size)
    for size in _halves(chunk_tokens):
        try_step(model, 1, size, block_size)
    return Need(weights, max(prompts, decodes), decodes if graphs else 0)


def _halves(size: int) -> Iterator[int]:
    """Half of it, and again, down to 1."""
    while size := size // 2:
        yield size


def _peak(work: Callable[[], None], device: torch.device) -> int:
    """The most bytes that torch had allocated on the GPU during `work`."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


@torch.inference_mode()
def try_step(model: CausalLM, sequences: int, tokens: int, block_size: int) -> None:
    """Compute so many new sequences of so many tokens, with everything that can be asked of them:
    the log probabilities of all tokens."""
    blocks = -(-tokens // block_size)
    cache = PagedCache.scratch(model.kv_shape, len(model.layers), sequences * blocks, block_size,
                               like=model.net)  # fmt: skip
    attention = best(cache)
    hook.connect((layer.module for layer in model.layers), attention)
    tables = np.arange(sequences * blocks).reshape(sequences, blocks)
    step = PackedStep(tables, np.zeros(sequences, np.int64), np.full(sequences, tokens))
    attention.begin(step)
    ids = np.arange(sequences * tokens) % model.vocab_size
    logits = model.logits(ids, step.positions, np.arange(len(ids)))
    logits.float().log_softmax(-1)
    hook.disconnect(model.net)
