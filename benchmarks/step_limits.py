"""What one step of a model costs at least on a machine: its arithmetic and bytes over two rates.

The limit of a step is

    max(products' arithmetic, weights' bytes) + max(attention's arithmetic, KV's bytes)

each over the machine's rate, which are measured by a fixed method with the threads that torch has:
a vectorised read of 512 MB, and sgemm of 2048 x 2048 x 2048 by the faster of torch's two libraries,
BLAS and oneDNN (MKL leaves out half of what some AMD processors can do).

The vocabulary's projection counts for the rows that draw a token only, and reading the embedding
counts for nothing. Attention of a decoding sequence comes out at the bytes of its KV, that of a
prompt at its arithmetic. With int8 weights only the bytes are fewer: the arithmetic stays at
sgemm's rate.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

READ_BYTES = 512 << 20
SGEMM = 2048
_FLOAT = 4


@dataclass(frozen=True)
class Cell:
    """One kind of step: `sequences` that have `context` tokens each compute `tokens` more."""

    sequences: int
    context: int
    tokens: int

    @classmethod
    def prefill(cls, tokens: int) -> Cell:
        return cls(1, 0, tokens)

    @classmethod
    def decode(cls, sequences: int, context: int) -> Cell:
        return cls(sequences, context, 1)

    @property
    def decodes(self) -> bool:
        return self.context > 0

    def __str__(self) -> str:
        if self.decodes:
            return f"decode, batch {self.sequences}, context {self.context}"
        return f"prefill {self.tokens}"


# ---- the model


@dataclass(frozen=True)
class ModelCosts:
    """What a dense model's step is made of."""

    body: int
    """Weights of the products that every token goes through."""
    head: int
    """Weights of the vocabulary's projection."""
    weight_bytes: int
    """Of each weight."""
    kv_bytes: int
    """K and V of one token, all layers."""
    pair_flops: int
    """Attention of one query to one key, all layers and heads."""

    def products(self, cell: Cell) -> int:
        """Floating-point operations of a step's matrix products."""
        return 2 * cell.sequences * (self.body * cell.tokens + self.head)

    def weights(self) -> int:
        """Bytes of weights that a step reads."""
        return (self.body + self.head) * self.weight_bytes

    def attention(self, cell: Cell) -> int:
        """Floating-point operations of a step's attention."""
        pairs = cell.context * cell.tokens + cell.tokens * (cell.tokens + 1) // 2
        return cell.sequences * pairs * self.pair_flops

    def kv(self, cell: Cell) -> int:
        """Bytes of KV that a step reads and writes."""
        return cell.sequences * (cell.context + cell.tokens) * self.kv_bytes


def count(path: Path, *, weight_bytes: int, longest: int) -> ModelCosts:
    """Count a model folder's weights and KV, from its config alone.

    Ends the script for models whose steps don't read all weights and all KV: mixtures of experts,
    and sliding windows below `longest` tokens.
    """
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    with torch.device("meta"):
        net = AutoModelForCausalLM.from_config(config)
    text = config.get_text_config(decoder=True)
    _check_countable(net, text, longest)
    heads, layers = text.num_attention_heads, text.num_hidden_layers
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head = net.get_output_embeddings().weight
    return ModelCosts(
        body=_body(net, head),
        head=head.numel(),
        weight_bytes=weight_bytes,
        kv_bytes=2 * layers * kv_heads * width * _FLOAT,
        pair_flops=4 * layers * heads * width,
    )


def _check_countable(net: nn.Module, text: PreTrainedConfig, longest: int) -> None:
    if any(parameter.ndim > 2 for parameter in net.parameters()):
        sys.exit(f"--model: the limit of {text.model_type} can't be counted; take a dense model")
    window = getattr(text, "sliding_window", None)
    if window is not None and window < longest:
        sys.exit(f"--model: its window of {window} tokens isn't counted; take one without")


def _body(net: nn.Module, head: nn.Parameter) -> int:
    """Weights that are no vectors, no tables of embeddings and not `head`."""
    tables = [module.weight for module in net.modules() if isinstance(module, nn.Embedding)]
    left_out = {id(weight) for weight in [*tables, head]}
    return sum(w.numel() for w in net.parameters() if w.ndim == 2 and id(w) not in left_out)


# ---- the machine


@dataclass
class Machine:
    """The best rates seen so far."""

    flops: float = 0.0
    """Floating-point operations a second."""
    bytes: float = 0.0
    """Bytes read a second."""
    _read: torch.Tensor = field(default_factory=lambda: torch.ones(READ_BYTES // _FLOAT))
    _square: torch.Tensor = field(default_factory=lambda: torch.rand(SGEMM, SGEMM))

    def measure(self, times: int) -> None:
        """Once more `times` times, with as many threads as torch has."""
        ways = [_blas, _onednn] if torch.backends.mkldnn.is_available() else [_blas]
        for _ in range(times):
            seconds = min(_seconds(lambda way=way: way(self._square)) for way in ways)
            self.flops = max(self.flops, 2 * SGEMM**3 / seconds)
            self.bytes = max(self.bytes, READ_BYTES / _seconds(self._read.sum))

    def limit(self, model: ModelCosts, cell: Cell) -> float:
        """Seconds that the step takes at least."""
        products = max(model.products(cell) / self.flops, model.weights() / self.bytes)
        return products + max(model.attention(cell) / self.flops, model.kv(cell) / self.bytes)


def _blas(square: torch.Tensor) -> torch.Tensor:
    return torch.mm(square, square)


def _onednn(square: torch.Tensor) -> torch.Tensor:
    # torch's own products of this size go to BLAS; this is what its compiler calls for oneDNN.
    return torch.ops.mkldnn._linear_pointwise(square, square, None, "none", [], "")


def _seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


@contextmanager
def reading(core: int) -> Iterator[None]:
    """Meanwhile a process on that core reads memory as fast as it can."""
    spawn = multiprocessing.get_context("spawn")
    begun = spawn.Event()
    process = spawn.Process(target=_read_on, args=(core, begun), daemon=True)
    process.start()
    try:
        if not begun.wait(60):
            sys.exit("the process that reads memory doesn't start")
        yield
    finally:
        process.terminate()
        process.join()


def _read_on(core: int, begun: Event) -> None:
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    memory = torch.ones(READ_BYTES // _FLOAT)
    begun.set()
    while True:
        memory.sum()
