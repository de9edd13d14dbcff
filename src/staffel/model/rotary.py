"""Rotary embeddings that look at the longest position of a whole forward pass.

In a packed batch that would let one request change another's text. Which frequencies hold is
settled at load instead, by the longest sequence that can come.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from staffel.config import ConfigError


def pin(net: PreTrainedModel, max_model_len: int) -> None:
    """Make every rotary embedding of `net` the same at all positions below `max_model_len`.

    Raises:
        ConfigError: one would change with length, and can't be held.
    """
    for module, layer_type, rope_type in _rotaries(net):
        if rope_type == "longrope":
            _pin_longrope(module, layer_type, max_model_len)
        elif "dynamic" in rope_type and max_model_len > module.max_seq_len_cached:
            raise ConfigError(
                f"MODEL: rotary embeddings of type {rope_type} change with the longest sequence "
                f"of a batch beyond {module.max_seq_len_cached} tokens; "
                f"give --max-model-len {module.max_seq_len_cached} or less"
            )


def _rotaries(net: PreTrainedModel) -> Iterator[tuple[nn.Module, str | None, str]]:
    """Each rotary module with its layer type (None: it serves all) and rotary type."""
    for module in net.modules():
        types = getattr(module, "rope_type", None)
        if isinstance(types, str):
            yield module, None, types
        elif isinstance(types, dict):
            yield from ((module, layer_type, kind) for layer_type, kind in types.items())


def _pin_longrope(module: nn.Module, layer_type: str | None, max_model_len: int) -> None:
    """Use the long frequencies for all, if a sequence may need them; else the short ones stay."""
    params = module.config.rope_parameters
    original = (params if layer_type is None else params[layer_type])[
        "original_max_position_embeddings"
    ]
    if max_model_len <= original:
        return
    prefix = "" if layer_type is None else f"{layer_type}_"
    device = getattr(module, f"{prefix}inv_freq").device
    frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](
        module.config, device, seq_len=original + 1, layer_type=layer_type
    )
    # transformers picks between these two by the longest position: now both are the long ones.
    setattr(module, f"{prefix}original_inv_freq", frequencies)
    setattr(module, f"{prefix}long_inv_freq", frequencies)
