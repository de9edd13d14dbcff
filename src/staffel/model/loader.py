"""Loading a Hugging Face folder, and refusing by name what packed input can't serve rightly."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from staffel.config import ConfigError
from staffel.model import hook, rotary

_CPU = torch.device("cpu")
LAYER_TYPES = {"full_attention", "sliding_attention"}

# transformers loads under process-wide settings (default dtype, meta device).
_LOADING = threading.Lock()


class Refused(ConfigError):
    """A model that can't be served rightly."""

    def __init__(self, model_type: str, reason: object) -> None:
        super().__init__(f"MODEL: models of type {model_type} can't be served: {reason}")


@dataclass(frozen=True)
class CausalLM:
    """A model that computes packed tokens through our attention."""

    net: PreTrainedModel
    layers: list[hook.AttentionLayer]

    @property
    def model_type(self) -> str:
        return self.net.config.model_type

    @property
    def vocab_size(self) -> int:
        return _text_config(self.net.config).vocab_size

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """KV heads, K width and V width, the same in every layer."""
        return self.layers[0].shape

    def logits(self, ids: Any, positions: Any, keep: Any) -> Tensor:
        """[len(keep), vocab] of the packed tokens `keep` of `ids` [T] at `positions` [T]."""
        return packed_logits(self.net, ids, positions, keep)


def packed_logits(net: PreTrainedModel, ids: Any, positions: Any, keep: Any) -> Tensor:
    """Logits [len(keep), vocab]; with an empty `keep` the vocabulary projection is skipped."""
    numbers = (torch.as_tensor(x, dtype=torch.int64).to(net.device) for x in (ids, positions, keep))
    ids, positions, keep = numbers
    return net(
        input_ids=ids[None], position_ids=positions[None], logits_to_keep=keep, use_cache=False
    ).logits[0]


def load(
    path: Path, *, dtype: torch.dtype, max_model_len: int, device: torch.device = _CPU
) -> CausalLM:
    """Load a model folder, with our attention in place of its own.

    Raises:
        ConfigError: the folder can't be loaded, transformers doesn't know the architecture, or
            it is one that can't be served rightly.
    """
    with _LOADING:
        config = _read_config(path)
        _check_config(config)
        net = _read_weights(path, config, dtype).to(device)
    rotary.pin(net, max_model_len)
    return CausalLM(net, _probe(net, max_model_len))


def _read_config(path: Path) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except (ValueError, OSError, KeyError) as error:
        raise ConfigError(f"MODEL: transformers can't read {path}/config.json: {error}") from None


def _check_config(config: PreTrainedConfig) -> None:
    """Refuse what the config alone gives away, before the weights are read."""
    name = config.model_type
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise Refused(name, "transformers knows no text generation model of that type")
    if AutoModelForCausalLM._model_mapping[type(config)]._is_stateful:
        raise Refused(name, "they carry a running state, which a paged KV cache can't hold")
    strange = set(getattr(_text_config(config), "layer_types", None) or ()) - LAYER_TYPES
    if strange:
        raise Refused(
            name, f"they have {', '.join(sorted(strange))} layers; full and sliding attention work"
        )


def _text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    return config.get_text_config(decoder=True)


def _read_weights(path: Path, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    transformers_logging.disable_progress_bar()
    try:
        net, info = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            attn_implementation=hook.NAME,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except KeyError:
        raise Refused(
            config.model_type, "they don't take their attention from transformers' interface"
        ) from None
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        raise ConfigError(f"MODEL: can't load the weights in {path}: {error}") from None
    if info["missing_keys"]:
        missing = ", ".join(sorted(info["missing_keys"])[:3])
        raise ConfigError(f"MODEL: the weights in {path} lack {missing}; is the folder complete?")
    return net.eval().requires_grad_(False)


# ---- the probe run


def _probe(net: PreTrainedModel, max_model_len: int) -> list[hook.AttentionLayer]:
    """Run three tokens to see which modules attend; refuse what doesn't go as it should."""
    probe = hook.Probe()
    probe.connect(net)
    name = net.config.model_type
    try:
        with torch.inference_mode():
            logits = packed_logits(net, np.arange(3), np.arange(3), [0, 2])
    except ConfigError as error:
        raise Refused(name, error) from None
    except Exception as error:
        raise Refused(name, f"packed input doesn't go through ({error!r})") from error
    finally:
        hook.disconnect(net)
    for reason in _oddities(net, probe.layers, logits, max_model_len):
        raise Refused(name, reason)
    return probe.layers


def _oddities(
    net: PreTrainedModel, layers: list[hook.AttentionLayer], logits: Tensor, max_model_len: int
) -> Iterator[str]:
    """What a model did in the probe run that ours can't serve."""
    config = _text_config(net.config)
    expected = config.num_hidden_layers
    if len(layers) != expected or len({id(layer.module) for layer in layers}) != expected:
        yield f"their {expected} layers call transformers' attention interface {len(layers)} times"
    elif _slides(config, max_model_len) and not _windows_arrive(config, layers):
        yield "they have a sliding window, and don't tell transformers' attention interface"
    elif len({layer.shape for layer in layers}) > 1:
        yield "their layers differ in the shape of their KV"
    elif logits.shape[0] != 2:
        yield "they can't compute logits for chosen positions only"


def _slides(config: PreTrainedConfig, max_model_len: int) -> bool:
    """Whether there is a window that a sequence can outgrow."""
    window = getattr(config, "sliding_window", None)
    return window is not None and window < max_model_len


def _windows_arrive(config: PreTrainedConfig, layers: list[hook.AttentionLayer]) -> bool:
    """Whether every layer that slides says so. The self-check is too short to see it."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return any(layer.window for layer in layers)
    pairs = zip(kinds, layers, strict=True)
    return all(layer.window for kind, layer in pairs if kind == "sliding_attention")
