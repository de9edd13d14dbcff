"""How much of a GPU's memory is left for the KV cache, once the largest steps have been run.

An instance counts what it takes itself, and not what is free at the moment: others that start
beside it on the same GPU take theirs meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from staffel.config import ConfigError
from staffel.control.request import SamplingParams
from staffel.model import hook
from staffel.model.attention import PackedStep
from staffel.model.attention_kernels import best
from staffel.model.cache import PagedCache
from staffel.model.loader import CausalLM
from staffel.model.sampler import SamplingState, sample

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


@dataclass(frozen=True)
class Sizes:
    """The largest that a step can have."""

    chunk_tokens: int
    """Of prompts."""
    sequences: int
    max_model_len: int
    block_size: int


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


def need_of(model: CausalLM, sizes: Sizes, *, graphs: bool) -> Need:
    """Measured on the model's GPU, by steps of the largest sizes.

    Smaller ones follow, so that every kernel that a step may take is compiled by then.
    """
    device = model.net.device
    weights = torch.cuda.memory_allocated(device)
    prompts = _peak(lambda: try_prompts(model, sizes, sizes.chunk_tokens), device) - weights
    decodes = _peak(lambda: try_decodes(model, sizes, sizes.sequences), device) - weights
    for size in _halves(sizes.sequences):
        try_decodes(model, sizes, size)
    for size in _halves(sizes.chunk_tokens):
        try_prompts(model, sizes, size)
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
def try_prompts(model: CausalLM, sizes: Sizes, tokens: int) -> None:
    """Compute so many tokens of prompts, with all that can be asked of them: the log probabilities
    of every one. No sequence is longer than the model takes."""
    whole, rest = divmod(tokens, sizes.max_model_len)
    counts = [sizes.max_model_len] * whole + [rest] * (rest > 0)
    _logits(model, counts, sizes.block_size).log_softmax(-1)


@torch.inference_mode()
def try_decodes(model: CausalLM, sizes: Sizes, sequences: int) -> None:
    """Compute and draw the next token of so many sequences."""
    params = SamplingParams(max_tokens=1, temperature=1)
    states = [SamplingState(params, [1], [], None) for _ in range(sequences)]
    sample(_logits(model, [1] * sequences, sizes.block_size), states)


def _logits(model: CausalLM, counts: list[int], block_size: int) -> Tensor:
    """Of all tokens of new sequences, [tokens, vocab] in float32. What they are doesn't matter, so
    one block serves as everybody's cache."""
    cache = PagedCache.scratch(model.kv_shape, len(model.layers), 1, block_size, like=model.net)
    attention = best(cache)
    hook.connect((layer.module for layer in model.layers), attention)
    tables = np.zeros((len(counts), -(-max(counts) // block_size)), np.int64)
    step = PackedStep(tables, np.zeros(len(counts), np.int64), np.array(counts))
    attention.begin(step)
    ids = np.arange(sum(counts)) % model.vocab_size
    logits = model.logits(ids, step.positions, np.arange(len(ids)))
    hook.disconnect(model.net)
    return logits.float()
