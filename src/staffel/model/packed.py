"""Weights as kernels take them, and the modules that compute in place of a model's own.

Modules hold such weights as plain attributes, not as parameters: looking one up on each call
costs less, and whoever walks over a model's parameters doesn't take them for matrices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from staffel.config import Quantization
from staffel.kernels import elementwise, linear


class Weight(Protocol):
    """A matrix [n, k] in the layout of a kernel."""

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, k] times the transposed matrix, plus `bias` [n]: [T, n]."""

    def rows(self, ids: Tensor) -> Tensor:
        """Rows `ids` [T] of the matrix: [T, k]."""

    def tensors(self) -> list[Tensor]:
        """What it is made of, for `stored_weight`."""


@dataclass(frozen=True, eq=False)
class FloatWeight:
    """A `Weight` in float32."""

    packed: Tensor
    n: int
    k: int

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return linear.linear(x, self.packed, self.n, bias)

    def rows(self, ids: Tensor) -> Tensor:
        return linear.gather(self.packed, self.n, self.k, ids)

    def tensors(self) -> list[Tensor]:
        return [self.packed]


@dataclass(frozen=True, eq=False)
class Int8Weight:
    """A `Weight` in 8 bits and a scale for each row."""

    quantized: linear.Int8Weight

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return linear.linear_int8(x, self.quantized, bias)

    def rows(self, ids: Tensor) -> Tensor:
        return linear.gather_int8(self.quantized, ids)

    def tensors(self) -> list[Tensor]:
        return [self.quantized.packed, self.quantized.scales]


@dataclass(frozen=True, eq=False)
class DenseWeight:
    """A `Weight` as it is, for torch's own products."""

    matrix: Tensor

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return nn.functional.linear(x, self.matrix, bias)

    def rows(self, ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, self.matrix)

    def tensors(self) -> list[Tensor]:
        return [self.matrix]


def make_weight(matrix: Tensor, quantization: Quantization | None) -> Weight:
    """`matrix` [n, k], float32, packed."""
    if quantization == "int8":
        return Int8Weight(linear.quantize(matrix))
    return FloatWeight(linear.pack(matrix), *matrix.shape)


def stored_weight(
    tensors: Iterator[Tensor], n: int, k: int, quantization: Quantization | None
) -> Weight:
    """A weight [n, k] of the next ones of `tensors`, in the order of `Weight.tensors`."""
    if quantization == "int8":
        return Int8Weight(linear.Int8Weight(next(tensors), next(tensors), n, k))
    return FloatWeight(next(tensors), n, k)


# ---- modules


class Elementwise(Protocol):
    """The functions of `staffel.kernels.elementwise`, for one kind of device."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = ...) -> Tensor: ...
    def gated(self, x: Tensor, activation: elementwise.Activation) -> Tensor: ...
    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor: ...


class PackedLinear(nn.Module):
    """In place of one nn.Linear: [..., k] to [..., n]."""

    def __init__(self, weight: Weight, n: int, bias: Tensor | None) -> None:
        super().__init__()
        self._weight, self._n, self._bias = weight, n, bias

    def forward(self, x: Tensor) -> Tensor:
        out = self._weight.multiply(x.reshape(-1, x.shape[-1]), self._bias)
        return out.view(*x.shape[:-1], self._n)


class SharedProduct:
    """Several linear layers of one input as one product; each of them takes its part.

    The product is kept only until the last one took its part, and only for the tensor that it
    was computed from: whoever comes with another one has it computed anew.
    """

    def __init__(self, weight: Weight, sizes: list[int], bias: Tensor | None) -> None:
        self.weight, self.sizes, self.bias = weight, sizes, bias
        self.copies = True
        """Whether parts are copied, so that nothing lies between their rows."""
        self._input: Tensor | None = None
        self._parts: dict[int, Tensor] = {}

    def part(self, index: int, x: Tensor) -> Tensor:
        """[..., sizes[index]] of x [..., k]."""
        if self._input is not x or index not in self._parts:
            self._input, self._parts = x, self._compute(x)
        part = self._parts.pop(index)
        if not self._parts:
            self._input = None
        return part

    def _compute(self, x: Tensor) -> dict[int, Tensor]:
        out = self.weight.multiply(x.reshape(-1, x.shape[-1]), self.bias)
        parts: Iterable[Tensor] = out.split(self.sizes, -1)
        if self.copies:
            parts = (part.contiguous() for part in parts)
        return {i: part.view(*x.shape[:-1], -1) for i, part in enumerate(parts)}


class SharedLinear(nn.Module):
    """In place of one nn.Linear whose input others share."""

    def __init__(self, product: SharedProduct, index: int) -> None:
        super().__init__()
        self.product, self._index = product, index

    def forward(self, x: Tensor) -> Tensor:
        return self.product.part(self._index, x)


class PackedEmbedding(nn.Module):
    """In place of an embedding that shares its weights with a linear layer."""

    def __init__(self, weight: Weight, width: int, scale: float) -> None:
        super().__init__()
        self._weight, self._width, self._scale = weight, width, scale
        # transformers asks the first parameter for dtype and device, and would look for long.
        self.weight = nn.Parameter(torch.empty(0), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        rows = self._weight.rows(ids.reshape(-1)).view(*ids.shape, self._width)
        return rows if self._scale == 1 else rows * self._scale


class GatedMlp(nn.Module):
    """In place of a gated MLP: down(activation(gate) * up), gate and up being one product."""

    def __init__(
        self,
        kernels: Elementwise,
        gate_up: nn.Module,
        down: nn.Module,
        activation: elementwise.Activation,
    ) -> None:
        """`gate_up` gives the gate's m values, then the other factor's m; `down` takes m."""
        super().__init__()
        self._gated = kernels.gated
        self._gate_up, self._down, self._activation = gate_up, down, activation

    def forward(self, x: Tensor) -> Tensor:
        both = self._gate_up(x)
        product = self._gated(both.view(-1, both.shape[-1]), self._activation)
        return self._down(product.view(*x.shape[:-1], -1))


class RmsNorm(nn.Module):
    """In place of a root mean square norm over the last axis."""

    def __init__(
        self, kernels: Elementwise, weight: nn.Parameter, eps: float, offset: float
    ) -> None:
        super().__init__()
        self._rms_norm = kernels.rms_norm
        self._weight, self._eps, self._offset = weight.detach().clone(), eps, offset

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return self._rms_norm(rows, self._weight, self._eps, self._offset).view(x.shape)
