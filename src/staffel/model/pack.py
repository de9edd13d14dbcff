"""Putting kernels into a loaded model, without knowing its family.

A run of a few tokens shows which linear layers are called, and which of them with the same
tensor. On a CPU their weights go into panels, and packed modules take their places; on a GPU those
with the same tensor become one product. Then norms, gated MLPs and rotary embeddings that the
kernels can compute are replaced by them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from staffel.config import Quantization
from staffel.kernels import elementwise, linear
from staffel.model import fuse, hook, packfile
from staffel.model.loader import CausalLM, packed_logits
from staffel.model.packed import (
    DenseWeight,
    Elementwise,
    GatedMlp,
    PackedEmbedding,
    PackedLinear,
    SharedLinear,
    SharedProduct,
    Weight,
    make_weight,
    stored_weight,
)

_LAYOUT = 1
"""Goes up whenever `linear.pack` or `linear.quantize` lays weights out differently: packed weights
of an older layout in the cache are then made anew."""
_SMALL = 1 << 20
"""Bytes up to which a parameter that stays as it is is copied."""
_WORTH_SHARING = 64 << 20
"""Bytes of weights from which on they are shared through a file."""


@dataclass(frozen=True)
class Site:
    """Linear layers of one module that are called with the same tensor; often a single one."""

    names: tuple[str, ...]
    layers: tuple[nn.Module, ...]

    @property
    def parent(self) -> str:
        return self.names[0].rpartition(".")[0]

    @property
    def sizes(self) -> list[int]:
        """Outputs of each."""
        return [_shape(layer)[0] for layer in self.layers]

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs of all together, and inputs."""
        return sum(self.sizes), _shape(self.layers[0])[1]

    def matrix(self) -> Tensor:
        """All weights, one below the other: [n, k]."""
        parts = [_matrix(layer) for layer in self.layers]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def bias(self) -> Tensor | None:
        """[n]; zeros for those that have none, unless all have none."""
        own = [layer.bias for layer in self.layers]
        if all(bias is None for bias in own):
            return None
        zeros = (layer.weight.new_zeros(size) for layer, size in zip(
            self.layers, self.sizes, strict=True
        ))  # fmt: skip
        return torch.cat([z if b is None else b for b, z in zip(own, zeros, strict=True)])


@torch.inference_mode()
def pack_model(model: CausalLM, folder: Path, quantization: Quantization | None = None) -> None:
    """Let the kernels compute `model`, float32 on the CPU; its own weights are given up.

    `folder` is where it was loaded from.
    """
    _rebuild(model, elementwise, lambda sites: _weights(sites, folder, quantization))
    _let_go_of_the_file(model.net)


@torch.inference_mode()
def fuse_model(model: CausalLM, kernels: Elementwise) -> None:
    """Let as few kernels as possible compute `model`; its products stay torch's."""
    _rebuild(model, kernels, _joined)


def _rebuild(
    model: CausalLM,
    kernels: Elementwise,
    weights: Callable[[list[Site]], Iterable[Weight | None]],
) -> None:
    """`weights` makes one for each site; None: its layers stay as they are."""
    net = model.net
    sites = _watch(model, kernels)
    found = ((site.parent, _gate(net, site, sites, kernels)) for site in sites)
    gates = {parent: gate for parent, gate in found if gate is not None}
    for site, weight in zip(sites, weights(sites), strict=True):
        if weight is None:
            continue
        _replace_embedding(net, site, weight)
        for name, module in zip(site.names, _modules(site, weight), strict=True):
            _replace(net, name, module)
    _try_views(net)
    for parent, gate in gates.items():
        _replace(net, parent, gate.build(net, kernels))
    for name, module in list(net.named_modules()):
        norm = fuse.rms_norm(module, kernels)
        if norm is not None:
            _replace(net, name, norm)


def _joined(sites: list[Site]) -> Iterator[Weight | None]:
    """Of those with several layers, which from here on are parts of it: there is one copy."""
    for site in sites:
        if len(site.layers) == 1:
            yield None
            continue
        matrix = site.matrix()
        for layer, part in zip(site.layers, matrix.split(site.sizes), strict=True):
            layer.weight.data = part.t() if type(layer) is Conv1D else part
        yield DenseWeight(matrix)


def _try_views(net: PreTrainedModel) -> None:
    """Let layers of one input give views of their common product, if the model's code can take
    them: it reshapes with `view`, which doesn't take all that has gaps."""
    products = [module.product for module in net.modules() if isinstance(module, SharedLinear)]
    for product in products:
        product.copies = False
    try:
        _run(net)
    except RuntimeError:
        for product in products:
            product.copies = True


def _let_go_of_the_file(net: nn.Module) -> None:
    """Copy small parameters: a view of a file of weights keeps all of it in memory."""
    for parameter in net.parameters():
        if parameter.nbytes <= _SMALL:
            parameter.data = parameter.data.clone()


def _shape(layer: nn.Module) -> tuple[int, int]:
    n, k = layer.weight.shape
    return (k, n) if type(layer) is Conv1D else (n, k)


def _matrix(layer: nn.Module) -> Tensor:
    return layer.weight.t().contiguous() if type(layer) is Conv1D else layer.weight


def _replace(net: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(net.get_submodule(parent), leaf, module)


# ---- the run


@dataclass
class _Calls:
    """Notes which linear layers are called with which tensors."""

    inputs: dict[nn.Module, Tensor] = field(default_factory=dict)
    """In order of the calls. It keeps the tensors, so that no two share an id."""

    def note(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.inputs.setdefault(module, args[0])


def _watch(model: CausalLM, kernels: Elementwise) -> list[Site]:
    """Run three tokens: the sites, in order; rotary embeddings are replaced at the end of it."""
    net, calls = model.net, _Calls()
    packable = [module for module in net.modules() if type(module) in (nn.Linear, Conv1D)]
    handles = [module.register_forward_pre_hook(calls.note) for module in packable]
    rotaries = fuse.watch_rotary([layer.module for layer in model.layers], kernels)
    try:
        _run(net)
    finally:
        for handle in handles:
            handle.remove()
        for rotary in rotaries:
            rotary.settle()
    return list(_sites(net, calls.inputs))


def _run(net: PreTrainedModel) -> None:
    """Three tokens, without attention."""
    hook.Probe().connect(net)
    try:
        packed_logits(net, np.arange(3), np.arange(3), [0, 2])
    finally:
        hook.disconnect(net)


def _sites(net: nn.Module, inputs: dict[nn.Module, Tensor]) -> Iterator[Site]:
    """Layers in order of their calls, those of one module and one input together."""
    names = {module: name for name, module in net.named_modules()}
    shared: dict[tuple[str, int], list[nn.Module]] = {}
    for module, x in inputs.items():
        shared.setdefault((names[module].rpartition(".")[0], id(x)), []).append(module)
    for modules in shared.values():
        yield Site(tuple(names[module] for module in modules), tuple(modules))


# ---- weights


def _weights(sites: list[Site], folder: Path, quantization: Quantization | None) -> list[Weight]:
    """One for each site, through the cache's file if they are many bytes."""
    if sum(4 * n * k for n, k in (site.shape for site in sites)) < _WORTH_SHARING:
        return [make_weight(site.matrix(), quantization) for site in sites]
    plan = [(site.names, site.shape) for site in sites]
    version = (_LAYOUT, plan, linear.PANEL, transformers.__version__)
    tensors = iter(
        packfile.stored(
            folder, quantization or "float32", repr(version), partial(_made, sites, quantization)
        )
    )
    return [stored_weight(tensors, *site.shape, quantization) for site in sites]


def _made(sites: Iterable[Site], quantization: Quantization | None) -> Iterator[Tensor]:
    for site in sites:
        yield from make_weight(site.matrix(), quantization).tensors()


def _modules(site: Site, weight: Weight) -> list[nn.Module]:
    """What takes the place of each of the site's layers."""
    if len(site.layers) == 1:
        return [PackedLinear(weight, site.shape[0], site.bias())]
    product = SharedProduct(weight, site.sizes, site.bias())
    return [SharedLinear(product, index) for index in range(len(site.layers))]


def _replace_embedding(net: nn.Module, site: Site, weight: Weight) -> None:
    """If its weight is this site's too: so that there is one copy."""
    embedding = net.get_input_embeddings()
    if not isinstance(embedding, nn.Embedding) or len(site.layers) > 1:
        return
    if embedding.weight is not site.layers[0].weight:
        return
    ids = torch.arange(min(3, embedding.num_embeddings))
    scale = float(getattr(embedding, "embed_scale", 1.0))
    if fuse.alike(embedding.weight[ids] * scale, embedding(ids)):
        packed = PackedEmbedding(weight, embedding.embedding_dim, scale)
        net.set_input_embeddings(packed)


# ---- gated MLPs


@dataclass(frozen=True)
class _Gate:
    """A gated MLP: its sites and activation."""

    gate_up: Site
    down: Site
    activation: elementwise.Activation

    def build(self, net: nn.Module, kernels: Elementwise) -> GatedMlp:
        """After its linear layers are packed."""
        first = net.get_submodule(self.gate_up.names[0])
        if isinstance(first, SharedLinear):
            product = first.product
            first = PackedLinear(product.weight, sum(product.sizes), product.bias)
        return GatedMlp(kernels, first, net.get_submodule(self.down.names[0]), self.activation)


def _gate(net: nn.Module, site: Site, sites: list[Site], kernels: Elementwise) -> _Gate | None:
    """The gated MLP that `site` is gate and up of, if it is."""
    others = [other for other in sites if other.parent == site.parent and other is not site]
    if not site.parent or len(others) != 1 or not _gated_shapes(site, others[0]):
        return None
    mlp, down = net.get_submodule(site.parent), others[0]
    if not _all_of(mlp, [*site.layers, *down.layers]):
        return None
    activation = fuse.gate_of(mlp, site.layers, down.layers[0], site.shape[1], kernels)
    return None if activation is None else _Gate(site, down, activation)


def _gated_shapes(gate_up: Site, down: Site) -> bool:
    """Whether there are as many gates as ups, and `down` takes as many."""
    n, k = gate_up.shape
    return gate_up.sizes in ([n], [n // 2, n // 2]) and down.sizes == [k] and down.shape[1] * 2 == n


def _all_of(mlp: nn.Module, layers: list[nn.Module]) -> bool:
    """Whether the MLP has no parameters but those of these layers."""
    known = {id(parameter) for layer in layers for parameter in layer.parameters()}
    return all(id(parameter) in known for parameter in mlp.parameters())
