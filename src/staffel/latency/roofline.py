"""Step times from a hardware sheet, by roofline: each part takes as long as its arithmetic or its
memory traffic, whichever is slower (Williams et al., CACM 2009), and then devices talk."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from staffel.config import ConfigError
from staffel.latency.hardware import WEIGHT_BYTES, Hardware
from staffel.latency.model import Work
from staffel.latency.shape import ModelShape

ACTIVATION_BYTES = 2


class Precision(NamedTuple):
    """Dtypes of what is stored; weights multiply at their own dtype's speed where there is one."""

    weights: str = "bfloat16"
    experts: str = "bfloat16"
    kv: str = "bfloat16"


BFLOAT16 = Precision()


class Efficiency(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of the sheet's peaks that are reached, and times that no sheet states.

    The defaults are round figures of what engines reach on an H100; benchmarks/silicon.py fits them
    for each of three engines.
    """

    compute: float = 0.62
    """Of peak FLOP/s, in matrix products of many tokens."""
    narrow_compute: float = 0.65
    """The same, of the peaks for eight bits and fewer."""
    experts: float = 0.35
    """What experts reach of what dense layers reach: their batches are uneven."""
    attention: float = 0.4
    """Of peak FLOP/s, in attention."""
    memory: float = 0.88
    """Of memory bandwidth."""
    link: float = 0.65
    """Of the bandwidth between devices."""
    collective_s: float = 15e-6
    """Before the first byte of an all-reduce arrives."""
    layer_s: float = 15e-6
    """Per layer: small kernels, and gaps between kernels."""
    expert_layer_s: float = 12e-6
    """More, per layer with experts: routing, and collecting what belongs together."""
    qk_norm_s: float = 10e-6
    """More, per layer that normalises queries and keys."""
    eager_layer_s: float = 0.4e-3
    """Per layer, at least, of steps with prompts: no recorded graph fits them, so the host launches
    every kernel, and short prompts wait for the host."""
    eager_expert_layer_s: float = 0.8e-3
    """More, per layer with experts."""
    step_s: float = 0.7e-3
    """Per step: scheduling, sampling, input preparation."""
    token_bytes: float = 30
    """Activation traffic, in hidden widths per token and layer (times two bytes)."""


TYPICAL = Efficiency()


class RooflineModel:
    """One instance's step times.

    Args:
        tp: devices that share each layer; their KV heads are copied where there are fewer.
        pp: devices, times tp, that the layers are dealt to. A step is all stages one after another.

    Raises:
        ConfigError: the sheet has no figure for a dtype, or tp or pp does not suit the model.
    """

    def __init__(
        self,
        hardware: Hardware,
        shape: ModelShape,
        *,
        tp: int = 1,
        pp: int = 1,
        precision: Precision = BFLOAT16,
        efficiency: Efficiency = TYPICAL,
    ) -> None:
        _check(shape, tp, pp, precision)
        self.hardware = hardware
        self.shape = shape
        self.tp = tp
        self.pp = pp
        self.precision = precision
        self.efficiency = efficiency
        self._bandwidth = hardware.memory_bytes_per_second * efficiency.memory
        self._dense_rate = self._reached(precision.weights)
        self._expert_rate = self._reached(precision.experts) * efficiency.experts
        self._ends = "float32" if precision.weights == "float32" else "bfloat16"
        self._head_rate = self._reached(self._ends)
        self._attention_rate = hardware.peak("bfloat16") * efficiency.attention * tp
        self._gaps = (
            shape.layers * (efficiency.layer_s + shape.qk_norm * efficiency.qk_norm_s)
            + shape.moe_layers * efficiency.expert_layer_s
        )
        self._eager = (
            shape.layers * efficiency.eager_layer_s
            + shape.moe_layers * efficiency.eager_expert_layer_s
        )
        self._link = hardware.link_bytes_per_second * efficiency.link

    def step_seconds(self, work: Work) -> float:
        tokens = work.prompt_tokens + work.decodes
        device = (
            self._dense(tokens)
            + self._head(work.prompts + work.decodes)
            + self._experts(tokens)
            + self._prompt_attention(work)
            + self._decode_attention(work)
            + self._activations(tokens)
            + self._communication(tokens)
            + self._gaps
        )
        return self.efficiency.step_s + (max(device, self._eager) if work.prompts else device)

    def _reached(self, dtype: str) -> float:
        """FLOP/s of matrix products, over all devices."""
        peak = self.hardware.peak(dtype)
        narrow = peak > self.hardware.peak("bfloat16")
        share = self.efficiency.narrow_compute if narrow else self.efficiency.compute
        return peak * share * self.tp

    def kv_bytes_per_token(self) -> int:
        """Of all layers and heads, over all devices, each value once."""
        return self.shape.kv_bytes_per_token(WEIGHT_BYTES[self.precision.kv])

    def weight_bytes(self) -> float:
        """Of one copy of the model; embedding and output projection are not quantised."""
        shape = self.shape
        ends = (shape.head_weights + shape.embedding_weights) * WEIGHT_BYTES[self._ends]
        dense = shape.dense_weights * WEIGHT_BYTES[self.precision.weights]
        return dense + shape.all_expert_weights * WEIGHT_BYTES[self.precision.experts] + ends

    def kv_tokens(self, *, usable: float = 0.9) -> int:
        """Tokens of KV cache that fit beside the weights in the `usable` share of memory.

        Raises:
            ConfigError: not even the weights fit.
        """
        memory = self.hardware.memory_bytes * usable
        free = memory - self.weight_bytes() / (self.tp * self.pp)
        if free <= 0:
            raise ConfigError(
                f"tp, pp: the weights ({self.weight_bytes() / 1e9:.0f} GB) do not fit in "
                f"{self.tp} x {self.pp} {self.hardware.name} with {memory / 1e9:.0f} GB usable each"
            )
        return int(free * self.pp * self._kv_ways() / self.kv_bytes_per_token())

    def _kv_ways(self) -> int:
        return min(self.tp, self.shape.kv_heads)

    def _dense(self, tokens: int) -> float:
        return self._product(
            self.shape.dense_weights, tokens, self._dense_rate, self.precision.weights
        )

    def _head(self, rows: int) -> float:
        return self._product(self.shape.head_weights, rows, self._head_rate, self._ends)

    def _product(self, weights: float, tokens: int, rate: float, dtype: str) -> float:
        size = weights * WEIGHT_BYTES[dtype] / self.tp
        return max(2 * weights * tokens / rate, size / self._bandwidth)

    def _experts(self, tokens: int) -> float:
        shape = self.shape
        if not shape.experts:
            return 0.0
        per_expert = shape.moe_layers * shape.expert_weights
        read = per_expert * shape.active_experts(tokens)
        compute = 2 * per_expert * shape.experts_per_token * tokens / self._expert_rate
        size = read * WEIGHT_BYTES[self.precision.experts] / self.tp
        return max(compute, size / self._bandwidth)

    def _prompt_attention(self, work: Work) -> float:
        if not work.prompts:
            return 0.0
        shape = self.shape
        seen = self._over_layers(work.prompt_pairs, work.prompt_tokens)
        return 2 * seen * shape.heads * (shape.qk_dim + shape.v_dim) / self._attention_rate

    def _decode_attention(self, work: Work) -> float:
        if not work.decodes:
            return 0.0
        shape = self.shape
        seen = self._over_layers(work.decode_context, work.decodes)
        compute = 2 * seen * shape.heads * shape.decode_dim / self._attention_rate
        size = seen * shape.kv_values * WEIGHT_BYTES[self.precision.kv] / self._kv_ways()
        return max(compute, size / self._bandwidth)

    def _over_layers(self, pairs: int, tokens: int) -> int:
        """Pairs summed over layers; a window bounds what each token sees."""
        shape = self.shape
        if shape.window is None:
            return pairs * shape.layers
        windowed = min(pairs, tokens * shape.window)
        return pairs * (shape.layers - shape.window_layers) + windowed * shape.window_layers

    def _activations(self, tokens: int) -> float:
        width = self.shape.hidden * self.shape.layers * ACTIVATION_BYTES
        return tokens * width * self.efficiency.token_bytes / self.tp / self._bandwidth

    def _communication(self, tokens: int) -> float:
        """Two all-reduces per layer (Megatron-LM, arXiv 1909.08053), and stages' hand-overs."""
        size = tokens * self.shape.hidden * ACTIVATION_BYTES
        between_stages = (self.pp - 1) * (size / self._link + self.efficiency.collective_s)
        if self.tp == 1:
            return between_stages
        ring = 2 * (self.tp - 1) / self.tp * size / self._link
        return 2 * self.shape.layers * (ring + self.efficiency.collective_s) + between_stages


def fewest_devices(
    hardware: Hardware, shape: ModelShape, precision: Precision = BFLOAT16, *, usable: float = 0.9
) -> int:
    """The smallest tp (1, 2, 4 ...) at which the weights fit in the `usable` share of memory.

    Raises:
        ConfigError: they don't, however many devices share the layers.
    """
    tp = 1
    while shape.heads % tp == 0:
        model = RooflineModel(hardware, shape, tp=tp, precision=precision)
        if model.weight_bytes() < hardware.memory_bytes * usable * tp:
            return tp
        tp *= 2
    raise ConfigError(f"--hardware: the model does not fit in {tp // 2} {hardware.name}")


def _check(shape: ModelShape, tp: int, pp: int, precision: Precision) -> None:
    unknown = [dtype for dtype in precision if dtype not in WEIGHT_BYTES]
    if unknown:
        raise ConfigError(f"dtype: {unknown[0]!r} is not one of {', '.join(WEIGHT_BYTES)}")
    if tp < 1 or shape.heads % tp:
        raise ConfigError(f"tp: {tp} does not divide the model's {shape.heads} attention heads")
    if not 1 <= pp <= shape.layers:
        raise ConfigError(f"pp: {pp} is not between 1 and the model's {shape.layers} layers")
