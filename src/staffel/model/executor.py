"""The executor of one instance: batches in, drawn tokens out; it decides nothing."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from staffel.config import ConfigError, Device, Dtype, ModelSpec, Quantization
from staffel.control.messages import (
    Batch,
    BatchResult,
    Enter,
    KvRegion,
    ReadChunk,
    Row,
    RowResult,
)
from staffel.kernels import library
from staffel.model import attention_kernels, hook, loader, pack, selfcheck
from staffel.model.attention import PackedStep
from staffel.model.cache import PagedCache, blocks_that_fit
from staffel.model.grammar import Grammars
from staffel.model.sampler import SamplingState, sample, score
from staffel.model.slots import Slots
from staffel.model.tape import Ints, Tapes
from staffel.transfer import KvMemory, KvShape, Peer, Unreachable, attach, create

log = logging.getLogger(__name__)


class Executor:
    """A model, its paged KV cache, and the sequences in its slots.

    Not for use by two threads at a time. Several executors in one process don't touch each
    other, but share torch's number of threads.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        kv_bytes: int,
        block_size: int = 16,
        max_sequences: int = 128,
        device: Device = "auto",
        dtype: Dtype = "auto",
        quantization: Quantization | None = None,
        threads: int | None = None,
    ) -> None:
        """Load the model, check it, and take `kv_bytes` of memory for the cache.

        Raises:
            ConfigError: the model can't be served rightly, or the memory doesn't do.
        """
        _check_device(device)
        if threads is not None:
            torch.set_num_threads(threads)
        path = Path(spec.path)
        kernels = _kernels(_dtype(dtype), quantization)
        self._model = loader.load(path, dtype=_dtype(dtype), max_model_len=spec.max_model_len)
        expected = selfcheck.reference(self._model)
        if kernels is not None:
            pack.pack_model(self._model, path, quantization)
        selfcheck.check(self._model, expected, quantization)
        shape = _shape(self._model, max_sequences, block_size)
        blocks = blocks_that_fit(kv_bytes, shape, spec.max_model_len)
        self._memory: KvMemory = create(msgspec.structs.replace(shape, num_blocks=blocks))
        cache = PagedCache.over(self._memory.k, self._memory.v)
        self._attention = attention_kernels.best(cache)
        hook.connect((layer.module for layer in self._model.layers), self._attention)
        self._tapes = (
            None if kernels is None else Tapes(self._model, self._attention, max_sequences)
        )
        self._slots = Slots(max_sequences, spec.max_model_len, block_size)
        self._sequences: dict[int, _Sequence] = {}
        self._grammars = Grammars(path, spec.vocab_size, spec.eos_ids)
        self._peers: dict[tuple[str, int], Peer] = {}

    @property
    def region(self) -> KvRegion:
        """What a peer needs to read this executor's cache."""
        return self._memory.region

    def attach(self, instance: str, incarnation: int, region: KvRegion) -> None:
        """Open a peer's cache for reads. One that can't be opened makes its reads fail.

        Raises:
            ConfigError: the peer's cache is laid out differently.
        """
        self.detach(instance, incarnation)
        try:
            self._peers[instance, incarnation] = attach(region, self._memory)
        except Unreachable as error:
            log.warning("no KV can be read from %s: %s", instance, error)

    def detach(self, instance: str, incarnation: int) -> None:
        """Close a peer's cache, if it is open."""
        peer = self._peers.pop((instance, incarnation), None)
        if peer is not None:
            peer.close()

    @torch.inference_mode()
    def execute(self, batch: Batch) -> BatchResult:
        """Do what a batch says.

        Raises:
            ValueError: the batch goes against what earlier ones told (a fault of the engine).
        """
        for slot in batch.leaves:
            self._leave(slot)
        for enter in batch.enters:
            self._enter(enter)
        for slot, blocks in batch.grown:
            self._slots.grow(slot, blocks)
        reads = [self._read(chunk) for chunk in batch.reads]
        rows = [*map(self._slots.next_row, batch.decodes), *batch.rows]
        results = self._compute(rows) if rows else []
        decoded = results[: len(batch.decodes)]
        return BatchResult(
            results[len(decoded) :],
            reads,
            [result.token for result in decoded],
            {place: result for place, result in enumerate(decoded) if _says_more(result)},
        )

    def close(self) -> None:
        """Give the memory back: the cache, peers' caches and the model."""
        for key in list(self._peers):
            self.detach(*key)
        hook.disconnect(self._model.net)
        self._memory.close()
        del self._attention, self._model, self._tapes

    # ---- slots

    def _enter(self, enter: Enter) -> None:
        prompt, outputs = enter.ids[: enter.prompt_len], enter.ids[enter.prompt_len :]
        text = enter.params.grammar
        grammar = None if text is None else self._grammars.matcher(text)
        state = SamplingState(enter.params, prompt, outputs, grammar)
        self._sequences[enter.slot] = _Sequence(enter.prompt_len, state)
        self._slots.enter(enter.slot, enter.ids)
        self._memory.set_generation(enter.slot, enter.dispatch)

    def _leave(self, slot: int) -> None:
        # First of all: from here on a peer's read of these blocks is void.
        self._memory.clear(slot)
        self._slots.leave(slot)
        self._sequences.pop(slot, None)

    # ---- reads

    def _read(self, chunk: ReadChunk) -> bool:
        peer = self._peers.get((chunk.source, chunk.source_incarnation))
        if peer is None:
            return False
        peer.read_blocks(chunk.source_blocks, chunk.blocks)
        return chunk.confirm is None or peer.confirm(*chunk.confirm)

    # ---- rows

    def _compute(self, rows: list[Row]) -> list[RowResult]:
        step, ids = self._slots.pack(rows)
        self._attention.begin(step)
        firsts = step.offsets.tolist()
        drawn = [first + r.count - 1 for first, r in zip(firsts, rows, strict=True) if r.sample]
        targets = [self._targets(row) for row in rows]
        scored = [
            first + place
            for first, follow in zip(firsts, targets, strict=True)
            for place in range(len(follow or ()))
        ]
        logits = self._logits(step, ids, drawn + scored).float().cpu()
        results = self._draw(rows, logits[: len(drawn)])
        return self._add_scores(rows, results, targets, logits[len(drawn) :])

    def _logits(self, step: PackedStep, ids: Ints, keep: list[int]) -> Tensor:
        """[len(keep), vocab], of the packed tokens `keep`."""
        recorded = self._tapes.logits(step, ids, keep) if self._tapes is not None else None
        return self._model.logits(ids, step.positions, keep) if recorded is None else recorded

    def _draw(self, rows: list[Row], logits: Tensor) -> list[RowResult]:
        """A result for each row, from logits [rows that draw, vocab]."""
        slots = [row.slot for row in rows if row.sample]
        drawn = sample(logits, [self._sequences[slot].state for slot in slots])
        for slot, result in zip(slots, drawn, strict=True):
            self._slots.append(slot, result.token)
        each = iter(drawn)
        return [next(each) if row.sample else RowResult() for row in rows]

    def _targets(self, row: Row) -> list[int] | None:
        """Prompt tokens that follow the row's positions; None where nobody asked to score them."""
        sequence = self._sequences[row.slot]
        if sequence.prompt_logprobs is None or row.start >= sequence.prompt_len:
            return None
        stop = min(row.start + row.count + 1, sequence.prompt_len)
        return self._slots.ids[row.slot, row.start + 1 : stop].tolist()

    def _add_scores(
        self,
        rows: list[Row],
        results: list[RowResult],
        targets: list[list[int] | None],
        logits: Tensor,
    ) -> list[RowResult]:
        """The results with prompt log probabilities, from logits [all targets, vocab]."""
        sizes = [len(ids or ()) for ids in targets]
        for index, part in enumerate(logits.split(sizes)):
            if targets[index] is not None:
                top = self._sequences[rows[index].slot].prompt_logprobs
                scores = score(part, targets[index], top) if sizes[index] else []
                results[index] = msgspec.structs.replace(results[index], prompt_logprobs=scores)
        return results


@dataclass(frozen=True)
class _Sequence:
    """What a slot's rows need besides ids and blocks."""

    prompt_len: int
    state: SamplingState

    @property
    def prompt_logprobs(self) -> int | None:
        return self.state.params.prompt_logprobs


def _says_more(result: RowResult) -> bool:
    """Than the token."""
    return result.logprobs is not None or result.grammar_ended


def _check_device(device: Device) -> None:
    if device == "cuda":
        raise ConfigError("--device: cuda can't be used yet; take cpu")


def _dtype(dtype: Dtype) -> torch.dtype:
    """The one asked for; "auto" is float32: half the width is many times slower on most CPUs."""
    return torch.float32 if dtype == "auto" else getattr(torch, dtype)


def _kernels(dtype: torch.dtype, quantization: Quantization | None) -> str | None:
    """The instruction set of the kernels in use; None: torch computes everything.

    Raises:
        ConfigError: there are none, and the quantization needs them.
    """
    level = library.level() if dtype == torch.float32 else None
    if level is None and quantization is not None:
        raise ConfigError(
            f"--quantization: {quantization} needs --dtype float32 and the CPU kernels, which are "
            "built where a C compiler is found (and not switched off by STAFFEL_KERNELS)"
        )
    weights = quantization or str(dtype).removeprefix("torch.")
    log.info("%s weights, computed by %s", weights, f"{level} kernels" if level else "torch")
    return level


def _shape(model: loader.CausalLM, slots: int, block_size: int) -> KvShape:
    """That of the model's KV; how many blocks there are is settled later."""
    kv_heads, k_width, v_width = model.kv_shape
    return KvShape(
        slots=slots,
        num_blocks=0,
        layers=len(model.layers),
        block_size=block_size,
        kv_heads=kv_heads,
        k_width=k_width,
        v_width=v_width,
        dtype=model.net.dtype,
    )
