"""Finding what of a model one kernel can compute, and making sure of it.

A candidate is recognised by its structure, in whatever model family, and then put to the test: on
the same input it has to give what the model's own code gives. Where it doesn't, that code stays.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from staffel.kernels.elementwise import Activation
from staffel.model.packed import Elementwise, RmsNorm

_ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh")
_ROTARY = "apply_rotary_pos_emb"
"""What transformers' attention modules call the function, each a namesake in its own file."""
_ROWS = 3
_ROUNDING = {
    torch.float32: (1e-4, 1e-5),
    torch.bfloat16: (2e-2, 2e-2),
    torch.float16: (4e-3, 4e-3),
}
"""Relative to a number, and to the largest one. A model's own code rounds after every operation, a
kernel once."""


def alike(ours: Tensor, theirs: Tensor) -> bool:
    """Whether two results differ by rounding alone."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    relative, absolute = _ROUNDING[theirs.dtype]
    return torch.allclose(ours, theirs, rtol=relative, atol=absolute * float(theirs.abs().max()))


def _sample(width: int, like: Tensor) -> Tensor:
    """[_ROWS, width] of normal numbers, the same each time, whatever the global seed."""
    numbers = torch.randn(_ROWS, width, generator=torch.Generator().manual_seed(1))
    return numbers.to(like.device, like.dtype)


def _wide(module: nn.Module) -> Any:
    """The module in float32, for a comparison that rounding doesn't blur; itself if it is that."""
    if all(parameter.dtype == torch.float32 for parameter in module.parameters()):
        return module
    return deepcopy(module).float()


# ---- root mean square norms


def rms_norm(module: nn.Module, kernels: Elementwise) -> RmsNorm | None:
    """What replaces `module`, if it is such a norm."""
    weight, eps = _norm_parts(module)
    if weight is None or eps is None:
        return None
    wide = _wide(module)
    x = _sample(len(weight), wide.weight)
    theirs = wide(x)
    for offset in (0.0, 1.0):
        if alike(RmsNorm(kernels, wide.weight, eps, offset)(x), theirs):
            return RmsNorm(kernels, weight, eps, offset)
    return None


def _norm_parts(module: nn.Module) -> tuple[nn.Parameter | None, float | None]:
    """Its weight and epsilon, if it has those and no other parts."""
    names = [name for name, _ in module.named_parameters()]
    numbers = (getattr(module, name, None) for name in ("variance_epsilon", "eps"))
    eps = next((number for number in numbers if isinstance(number, float)), None)
    if names != ["weight"] or "RMSNorm" not in type(module).__name__ or module.weight.dim() != 1:
        return None, None
    return module.weight, eps


# ---- gated MLPs


def gate_of(
    mlp: nn.Module,
    gate_up: Sequence[nn.Module],
    down: nn.Module,
    width: int,
    kernels: Elementwise,
) -> Activation | None:
    """The activation with which `mlp` is down(activation(gate) * up); None: it is something else.

    Args:
        gate_up: the layers whose outputs, side by side, are gate and up.
        width: values of a row of the input.
    """
    names = {module: name for name, module in mlp.named_modules()}
    wide = _wide(mlp)
    gate_up = [wide.get_submodule(names[layer]) for layer in gate_up]
    down = wide.get_submodule(names[down])
    x = _sample(width, next(wide.parameters()))
    try:
        theirs = wide(x)
    except Exception:  # whatever it wants, it is no function of one tensor
        return None
    both = torch.cat([part(x) for part in gate_up], -1)
    gates = ((name, kernels.gated(both, name)) for name in _ACTIVATIONS)
    return next((name for name, product in gates if alike(down(product), theirs)), None)


# ---- rotary embeddings


@dataclass
class RotaryWatch:
    """Stands in for a module's rotary function during a run, and compares ours with it."""

    module: nn.Module
    own: Callable[..., Any]
    kernels: Elementwise
    alike: bool | None = None
    """None: never called."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        theirs = self.own(*args, **options)
        same = not options and _fits(*args) and all(map(alike, self._ours(*args), theirs))
        self.alike = same and self.alike is not False
        return theirs

    def settle(self) -> None:
        """After the run: ours in place of the module's own, if it is the same."""
        self.module.__dict__.pop("forward")
        if self.alike:
            _rebind(self.module, self._ours)

    def _ours(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return self.kernels.rotary(q, cos, sin), self.kernels.rotary(k, cos, sin)


def watch_rotary(modules: Sequence[nn.Module], kernels: Elementwise) -> list[RotaryWatch]:
    """Let those of the attention modules that rotate be watched."""
    own = [(module, _forward(module).__globals__.get(_ROTARY)) for module in modules]
    watches = [
        RotaryWatch(module, function, kernels) for module, function in own if function is not None
    ]
    for watch in watches:
        _rebind(watch.module, watch)
    return watches


def _fits(*args: Any) -> bool:
    """Whether the arguments are as the kernels' `rotary` wants them."""
    if len(args) != 4:
        return False
    q, k, cos, sin = args
    return (
        all(x.dim() == 4 and x.shape[0] == 1 and x.stride(3) == 1 for x in (q, k))
        and all(x.dim() == 3 and x.shape[0] == 1 and x.is_contiguous() for x in (cos, sin))
        and cos.shape[2] <= min(q.shape[3], k.shape[3])
        and all(x.dtype == q.dtype for x in args)
    )


def _forward(module: nn.Module) -> FunctionType:
    """The module's forward function without its wrappers (they know deprecated arguments)."""
    return inspect.unwrap(type(module).forward)


def _rebind(module: nn.Module, rotary: Callable[..., Any]) -> None:
    """Give this one module a forward that finds `rotary` under the name of its own function.

    Functions of a module's file can't be replaced for one model in any other way: the file is
    shared by all models of the process.
    """
    own = _forward(module)
    names = {**own.__globals__, _ROTARY: rotary}
    copy = FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
    copy.__kwdefaults__ = own.__kwdefaults__
    module.forward = MethodType(copy, module)  # type: ignore[method-assign]
