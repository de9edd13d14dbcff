"""Our attention in transformers' models: registered by name, connected module by module.

Keyword arguments of our own don't reach the attention function in every model family. What it
needs hangs on the attention module instead: each is given the function that computes its layer.
So nothing of a step is global, and models in several threads don't meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from staffel.config import ConfigError
from staffel.model.attention import Flavour, PagedAttention

NAME = "staffel"
"""Our attention's name in transformers. No mask function goes with it: then none is made."""

_HOOK = "staffel_attend"

Attend = Callable[[Tensor, Tensor, Tensor, Flavour], Tensor]


def _attention(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function, on packed tokens.

    q is [1, heads, T, k_width], k and v are [1, kv_heads, T, width]; gives [1, T, heads, v_width].
    """
    if attention_mask is not None or position_bias is not None:
        raise ConfigError("their attention wants a mask or a bias over all pairs of tokens")
    flavour = Flavour(
        scaling=q.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    attend: Attend = getattr(module, _HOOK)
    out = attend(q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1), flavour)
    return out[None], None


AttentionInterface.register(NAME, _attention)


@dataclass(frozen=True)
class AttentionLayer:
    """What a probe run saw of one layer."""

    module: nn.Module
    kv_heads: int
    k_width: int
    v_width: int
    window: int | None

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.kv_heads, self.k_width, self.v_width


@dataclass(frozen=True)
class Probe:
    """Stands in for attention: notes which modules call it, and computes nothing."""

    layers: list[AttentionLayer] = field(default_factory=list)

    def connect(self, model: nn.Module) -> None:
        for module in model.modules():
            setattr(module, _HOOK, partial(self._note, module))

    def _note(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, how: Flavour) -> Tensor:
        _, kv_heads, k_width = k.shape
        layer = AttentionLayer(module, kv_heads, k_width, v.shape[2], how.window)
        self.layers.append(layer)
        return q.new_zeros(q.shape[0], q.shape[1], layer.v_width)


def connect(modules: Iterable[nn.Module], attention: PagedAttention) -> None:
    """Let `attention` compute these modules, which are the layers in order."""
    for layer, module in enumerate(modules):
        setattr(module, _HOOK, partial(attention.attend, layer))


def disconnect(model: nn.Module) -> None:
    """Take every hook out, and with them the references to caches."""
    for module in model.modules():
        module.__dict__.pop(_HOOK, None)
