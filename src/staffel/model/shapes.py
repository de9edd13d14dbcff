"""Which batches a profile measures: a grid over what a step's time depends on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import Struct

from staffel.config import ConfigError
from staffel.latency.model import Work, pairs, phase_of

_LONGEST = 1024
"""Tokens of the longest sequences, or as many as the model takes."""
_ALONE = (1, 2, 4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256)
_LONG = (384, 512, 768, 1024)
_SEVERAL = ((2, 4), (2, 8), (4, 8), (8, 8), (3, 20), (6, 16), (4, 32), (2, 96), (8, 32), (4, 64))
_CACHED = ((8, 16), (16, 2), (32, 6), (64, 4), (64, 1), (128, 2), (256, 4), (256, 2))
"""New tokens, and which part of the rest of the longest sequence is there already (4: a fourth)."""
_DECODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_CONTEXTS = (32, 4, 1)
"""Parts of the longest sequence."""
_MIXED_DECODES = (1, 2, 4, 8, 16, 32)
_MIXED_PROMPTS = ((4, None), (16, 4), (48, 4), (96, None), (128, 4), (224, None))
"""As `_CACHED`; None: no part."""
_MIXED_CONTEXTS = (16, 2)
_COPIES = (1, 2, 4, 8, 16, 32, 64)

SLOWED = 1.5
"""How many times longer a step is expected to take beside a busy neighbour; for planning only."""
_BESIDE_SECONDS, _MOST_BESIDE = 0.1, 5
"""Beside a busy neighbour a shape is measured for about so long in each round, so many times at
most: how long a short step takes there depends on which part of its own the neighbour is at."""
LEAST_BY_PHASE = 14
"""Shapes that each phase keeps: with fewer its fit has nothing to be judged by."""


class BatchShape(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A batch of like prompts and like decoding sequences."""

    prompts: int = 0
    new: int = 0
    """Tokens of each prompt that are computed."""
    cached: int = 0
    """Tokens of each prompt that are there already."""
    decodes: int = 0
    context: int = 0
    """Keys that each decoding sequence sees, its own included."""

    @property
    def work(self) -> Work:
        return Work(
            prompt_tokens=self.prompts * self.new,
            prompt_pairs=self.prompts * pairs(self.new, self.cached),
            prompts=self.prompts,
            decodes=self.decodes,
            decode_context=self.decodes * self.context,
        )

    @property
    def phase(self) -> str:
        """prefill, decode or mixed."""
        return phase_of(self.work)

    @property
    def longest(self) -> int:
        """Tokens of its longest sequence, with the one that is drawn."""
        return max(self.new + self.cached, self.context) + 1

    def blocks(self, block_size: int) -> int:
        """KV blocks that it takes."""
        prompt, decode = (-(-n // block_size) for n in (self.new + self.cached, self.context))
        return self.prompts * prompt + self.decodes * decode


@dataclass(frozen=True)
class Limits:
    """What an instance can hold."""

    max_model_len: int
    blocks: int
    block_size: int
    sequences: int

    def hold(self, shape: BatchShape) -> bool:
        return (
            shape.longest <= self.max_model_len
            and shape.blocks(self.block_size) <= self.blocks
            and shape.prompts + shape.decodes <= self.sequences
        )


@dataclass(frozen=True)
class RoughCost:
    """Seconds of measuring a shape once, good enough to plan with."""

    step: float
    per_prompt_token: float
    per_decode: float

    def seconds(self, shape: BatchShape) -> float:
        decodes, tokens = shape.decodes, shape.prompts * shape.new
        return self.step + decodes * self.per_decode + tokens * self.per_prompt_token


def grid(limits: Limits) -> list[BatchShape]:
    """All shapes that are of interest and that the instance can hold."""
    longest = min(_LONGEST, limits.max_model_len - 2)
    shapes = _prefill(longest) + _decode(longest) + _mixed(longest)
    return [shape for shape in dict.fromkeys(shapes) if limits.hold(shape)]


def _prefill(longest: int) -> list[BatchShape]:
    alone = [BatchShape(prompts=1, new=new) for new in _ALONE + _LONG]
    several = [BatchShape(prompts=prompts, new=new) for prompts, new in _SEVERAL]
    cached = [_chunk(new, part, longest) for new, part in _CACHED]
    return alone + several + cached


def _chunk(new: int, part: int | None, longest: int, **decoding: int) -> BatchShape:
    """A prompt's chunk, after a part of what it leaves of the longest sequence."""
    new = min(new, longest)
    cached = 0 if part is None else (longest - new) // part
    return BatchShape(prompts=1, new=new, cached=cached, **decoding)


def _decode(longest: int) -> list[BatchShape]:
    contexts = [max(longest // part, 1) for part in _CONTEXTS]
    return [BatchShape(decodes=n, context=c) for n in _DECODES for c in contexts]


def _mixed(longest: int) -> list[BatchShape]:
    """Each number of sequences with each prompt; the contexts take turns."""
    return [
        _chunk(
            new,
            part,
            longest,
            decodes=decodes,
            context=max(longest // _MIXED_CONTEXTS[(row + column) % len(_MIXED_CONTEXTS)], 1),
        )
        for row, decodes in enumerate(_MIXED_DECODES)
        for column, (new, part) in enumerate(_MIXED_PROMPTS)
    ]


def reference_shapes(limits: Limits) -> list[BatchShape]:
    """A few of each phase, to measure how much a busy neighbour slows them down."""
    shapes = [
        BatchShape(prompts=1, new=32),
        BatchShape(prompts=1, new=128),
        BatchShape(prompts=1, new=256),
        BatchShape(decodes=1, context=128),
        BatchShape(decodes=4, context=128),
        BatchShape(decodes=16, context=128),
        BatchShape(prompts=1, new=64, decodes=4, context=128),
        BatchShape(prompts=1, new=128, decodes=8, context=128),
        BatchShape(prompts=1, new=192, decodes=16, context=128),
    ]
    return [shape for shape in shapes if limits.hold(shape)]


def neighbour_shapes(limits: Limits) -> dict[str, BatchShape]:
    """What a neighbour computes over and over, by phase: typical steps, the largest that fit."""
    kinds = {
        "prefill": [BatchShape(prompts=1, new=new) for new in (256, 128, 32, 8)],
        "decode": [BatchShape(decodes=n, context=c) for n, c in ((8, 256), (8, 64), (1, 8))],
    }
    held = {kind: list(filter(limits.hold, shapes)) for kind, shapes in kinds.items()}
    return {kind: shapes[0] for kind, shapes in held.items() if shapes}


@dataclass(frozen=True)
class Plan:
    """What one round measures."""

    shapes: list[BatchShape]
    """Measured while the neighbour rests."""
    reference: list[BatchShape]
    """Those of the shapes that are measured beside each busy neighbour, too; some repeatedly."""
    neighbour: dict[str, BatchShape]
    """What the busy neighbour computes, by phase."""
    copies: list[int]
    """Blocks of KV that are copied at a time."""
    cost: RoughCost

    @property
    def seconds(self) -> float:
        """Of a round, roughly."""
        alone = sum(self.expected(shape, beside=False) for shape in self.shapes)
        return alone + beside_seconds(self.reference, self.neighbour, self.cost)

    def expected(self, shape: BatchShape, *, beside: bool) -> float:
        """Seconds of measuring that shape once, roughly; `beside`: a busy neighbour."""
        return self.cost.seconds(shape) * (SLOWED if beside else 1)


def make_plan(limits: Limits, cost: RoughCost, seconds: float, *, beside: bool) -> Plan:
    """A round that takes so many seconds at most; `beside`: with a busy neighbour as well.

    Raises:
        ConfigError: the time doesn't do.
    """
    neighbour = neighbour_shapes(limits) if beside else {}
    reference = repeated(reference_shapes(limits), cost) if beside else []
    left = seconds - beside_seconds(reference, neighbour, cost)
    own = [shape for shape in grid(limits) if shape not in reference]
    alone = list(dict.fromkeys(reference))
    shapes = within(own, cost, left - sum(map(cost.seconds, alone)))
    copies = [blocks for blocks in _COPIES if blocks <= limits.blocks]
    return Plan(shapes + alone, reference, neighbour, copies, cost)


def repeated(shapes: Sequence[BatchShape], cost: RoughCost) -> list[BatchShape]:
    """Each as often as `_BESIDE_SECONDS` allow."""
    return [
        shape
        for shape in shapes
        for _ in range(min(max(1, round(_BESIDE_SECONDS / cost.seconds(shape))), _MOST_BESIDE))
    ]


def beside_seconds(
    reference: Sequence[BatchShape], neighbour: dict[str, BatchShape], cost: RoughCost
) -> float:
    """Of measuring the reference shapes beside each neighbour, who slows them down."""
    return SLOWED * len(neighbour) * sum(map(cost.seconds, reference))


def within(shapes: Sequence[BatchShape], cost: RoughCost, seconds: float) -> list[BatchShape]:
    """The shapes that can be measured once in that time: the dearest are left out.

    Raises:
        ConfigError: too few would be left to fit anything.
    """
    kept = list(shapes)
    left = Counter(shape.phase for shape in kept)
    total = sum(map(cost.seconds, kept))
    for shape in sorted(shapes, key=cost.seconds, reverse=True):
        if total <= seconds:
            return kept
        if left[shape.phase] > LEAST_BY_PHASE:
            kept.remove(shape)
            left[shape.phase] -= 1
            total -= cost.seconds(shape)
    if total > seconds:
        raise ConfigError(
            f"--budget: too short for this model: a round of its smallest batches takes "
            f"{total:.1f} s, and there is {max(seconds, 0):.1f} s for one; give more minutes"
        )
    return kept
