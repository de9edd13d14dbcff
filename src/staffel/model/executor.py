"""The executor of one instance: batches in, drawn tokens out; it decides nothing."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from staffel.config import (
    GPU_MEMORY_UTILIZATION,
    ConfigError,
    Device,
    Dtype,
    ModelSpec,
    Quantization,
)
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
from staffel.model import attention_kernels, hook, loader, memory, pack, selfcheck
from staffel.model.attention import PackedStep
from staffel.model.cache import PagedCache, blocks_that_fit
from staffel.model.grammar import Grammars
from staffel.model.sampler import SamplingState, sample, score
from staffel.model.slots import Slots
from staffel.model.tape import Tapes
from staffel.transfer import KvMemory, KvShape, Peer, Unreachable, attach, create

log = logging.getLogger(__name__)

Ints = np.ndarray[Any, Any]


@dataclass(frozen=True)
class GpuUse:
    """How an instance uses the machine's GPUs. Without any it doesn't matter."""

    number: int = 0
    """Its own among the instances on GPUs: they are dealt out in turn."""
    instances: int = 1
    """All of them."""
    utilization: float = GPU_MEMORY_UTILIZATION
    """Share of a GPU's memory for all instances on it."""
    graphs: bool = True
    """Whether decode steps are captured."""

    def index(self, gpus: int) -> int:
        """Of its GPU, of so many."""
        return self.number % gpus

    def share(self, place: torch.device) -> memory.Share:
        """Of the memory of its GPU."""
        gpus = torch.cuda.device_count()
        there = len(range(self.index(gpus), self.instances, gpus))
        total = torch.cuda.get_device_properties(place).total_memory
        return memory.Share(total, self.utilization, there)


class Executor:
    """A model, its paged KV cache, and the sequences in its slots.

    Not for use by two threads at a time. Several executors in one process don't touch each
    other, but share torch's number of threads; recorded steps keep the one of their recording.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        kv_bytes: int | None,
        block_size: int = 16,
        max_sequences: int = 128,
        chunk_tokens: int = 256,
        device: Device = "auto",
        gpu: GpuUse = GpuUse(),
        dtype: Dtype = "auto",
        quantization: Quantization | None = None,
        threads: int | None = None,
        decodes: bool = True,
    ) -> None:
        """Load the model, check it, and take memory for the cache.

        Args:
            kv_bytes: of the cache; None: what is left of the GPU.
            chunk_tokens: the most prompt tokens of a step.
            gpu: how it uses the GPU, if it is on one.
            decodes: False where sequences go on elsewhere after their prompt: then no decode
                steps are recorded.

        Raises:
            ConfigError: the model can't be served rightly, or the memory doesn't do.
        """
        place = _device(device, gpu)
        if threads is not None:
            torch.set_num_threads(threads)
        captures = place.type == "cuda" and decodes and gpu.graphs
        sizes = memory.Sizes(chunk_tokens, max_sequences, spec.max_model_len, block_size)
        try:
            self._model = _load(spec, place, dtype, quantization)
            need = _need(self._model, sizes, captures=captures)
        except torch.OutOfMemoryError:
            raise ConfigError(
                f"--device: the GPU's memory doesn't hold the weights of {spec.name} and a step of "
                f"--chunk-tokens {chunk_tokens} or --max-sequences {max_sequences}; give fewer, or "
                "take a larger GPU"
            ) from None
        shape = _shape(self._model, max_sequences, block_size)
        if kv_bytes is None:
            left = memory.left_for_kv(gpu.share(place), need)
            blocks = blocks_that_fit(left, shape, spec.max_model_len, "--gpu-memory-utilization")
        else:
            blocks = blocks_that_fit(kv_bytes, shape, spec.max_model_len)
        log.info("KV of %d tokens, %d MiB", blocks * block_size, (blocks * shape.block_bytes) >> 20)
        # Rows that fill a graph up write to one more block.
        self._spare = int(captures)
        shape = msgspec.structs.replace(shape, num_blocks=blocks + self._spare)
        self._block_bytes = shape.block_bytes
        self._memory: KvMemory = create(shape, place)
        cache = PagedCache.over(self._memory.k, self._memory.v)
        self._attention = attention_kernels.best(cache)
        hook.connect((layer.module for layer in self._model.layers), self._attention)
        self._recorded: _Recorded | None = None
        if captures:
            self._recorded = _graphs(self._model, self._attention, cache, shape, spec.max_model_len)
        elif decodes and isinstance(self._attention, attention_kernels.KernelAttention):
            self._recorded = Tapes(self._model, self._attention, shape.slots)
        self._slots = Slots(max_sequences, spec.max_model_len, block_size)
        self._sequences: dict[int, _Sequence] = {}
        self._grammars = Grammars(
            Path(spec.path), spec.vocab_size, spec.eos_ids, kept=2 * max_sequences
        )
        self._peers: dict[tuple[str, int], Peer] = {}

    @property
    def region(self) -> KvRegion:
        """What a peer needs to read this executor's cache."""
        region = self._memory.region
        if not self._spare:
            return region
        blocks = region.num_blocks - self._spare
        size = region.size // region.num_blocks * blocks
        return msgspec.structs.replace(region, num_blocks=blocks, size=size)

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

    def want_grammars(self, texts: Sequence[str]) -> None:
        """Grammars that sequences wait for now; they are compiled beside the steps."""
        self._grammars.want(texts)

    def grammars_arrived(self) -> list[tuple[str, str | None]]:
        """Grammars that can be used from now on, or what is wrong with them."""
        return self._grammars.arrived()

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
        # Copies that went on beside the step: blocks given up next belong to somebody else.
        copied, copied_s = self._finish_reads(batch.reads) if reads else (0, 0.0)
        decoded = results[: len(batch.decodes)]
        return BatchResult(
            results[len(decoded) :],
            reads,
            [result.token for result in decoded],
            {place: result for place, result in enumerate(decoded) if _says_more(result)},
            copied,
            copied_s,
        )

    def close(self) -> None:
        """Give the memory back: the cache, peers' caches and the model."""
        for key in list(self._peers):
            self.detach(*key)
        hook.disconnect(self._model.net)
        self._memory.close()
        del self._attention, self._model, self._recorded

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
        if chunk.confirm is None:
            return True
        peer.wait()  # rows of this very batch may use what was read
        return peer.confirm(*chunk.confirm)

    def _finish_reads(self, chunks: list[ReadChunk]) -> tuple[int, float]:
        """Bytes that were copied, and the seconds that it took."""
        seconds = sum(peer.finish() for peer in self._peers.values())
        there = ((chunk.source, chunk.source_incarnation) in self._peers for chunk in chunks)
        blocks = sum(len(c.blocks) for c, found in zip(chunks, there, strict=True) if found)
        size = blocks * self._block_bytes
        log.debug("%d bytes of KV copied in %.2f ms", size, 1e3 * seconds)
        return size, seconds

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
        logits = self._logits(step, ids, drawn + scored).float()
        results = self._draw(rows, logits[: len(drawn)])
        return self._add_scores(rows, results, targets, logits[len(drawn) :])

    def _logits(self, step: PackedStep, ids: Ints, keep: list[int]) -> Tensor:
        """[len(keep), vocab], of the packed tokens `keep`."""
        found = None if self._recorded is None else self._recorded.logits(step, ids, keep)
        return self._model.logits(ids, step.positions, keep) if found is None else found

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
    return result.logprobs is not None or result.grammar_ended or result.failure is not None


class _Recorded(Protocol):
    """Steps that are done again without the interpreter: `tape.Tapes` or `graphs.Graphs`."""

    def logits(self, step: PackedStep, ids: Ints, keep: list[int]) -> Tensor | None: ...


def _graphs(
    model: loader.CausalLM, attention: Any, cache: PagedCache, shape: KvShape, max_model_len: int
) -> _Recorded | None:
    from staffel.model.graphs import Graphs  # with Triton, which a CPU build of torch lacks

    blocks = -(-max_model_len // shape.block_size)
    try:
        return Graphs(
            model, attention, cache, most=shape.slots, blocks=blocks, spare=shape.num_blocks - 1
        )
    except RuntimeError as error:  # a pass that decides by what it computes, or too little memory
        log.warning("decode steps aren't captured as CUDA graphs: %s", error)
        return None


def _device(device: Device, gpu: GpuUse) -> torch.device:
    """The one asked for; "auto" is the CPU."""
    if device != "cuda":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("--device: torch sees no GPU here; take cpu, or a CUDA build of torch")
    place = torch.device("cuda", gpu.index(torch.cuda.device_count()))
    torch.cuda.set_device(place)  # where kernels of our own are launched
    return place


def _need(model: loader.CausalLM, sizes: memory.Sizes, *, captures: bool) -> memory.Need:
    """Of a GPU's memory; nothing where it is on a CPU."""
    if model.net.device.type != "cuda":
        return memory.Need(0, 0, 0)
    return memory.need_of(model, sizes, graphs=captures)


def _load(
    spec: ModelSpec, place: torch.device, dtype: Dtype, quantization: Quantization | None
) -> loader.CausalLM:
    """The model, with kernels where there are some, and checked."""
    path, width = Path(spec.path), _dtype(dtype, place)
    kernels = _kernels(place, width, quantization)
    model = loader.load(path, dtype=width, max_model_len=spec.max_model_len, device=place)
    expected = selfcheck.reference(model)
    if kernels is not None:
        pack.pack_model(model, path, quantization)
    elif place.type == "cuda":
        from staffel.model import elementwise_triton  # Triton comes with torch's CUDA builds

        pack.fuse_model(model, elementwise_triton)
        torch.cuda.empty_cache()  # of weights that were joined: others may start on this GPU now
    selfcheck.check(model, expected, quantization)
    return model


def _dtype(dtype: Dtype, device: torch.device) -> torch.dtype:
    """The one asked for; "auto" is bfloat16 on a GPU and float32 on a CPU, where half the width is
    many times slower."""
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, dtype)


def _kernels(
    device: torch.device, dtype: torch.dtype, quantization: Quantization | None
) -> str | None:
    """The instruction set of the CPU kernels in use; None: torch computes everything.

    Raises:
        ConfigError: there are none, and the quantization needs them.
    """
    on_cpu = device.type == "cpu"
    level = library.level() if on_cpu and dtype == torch.float32 else None
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
