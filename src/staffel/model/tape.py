"""Forward passes that are done again without the interpreter's share: modules, shapes, memory.

A decode step of so many sequences makes the same calls each time, of C functions and of torch's
operations, on the same shapes. A *tape* holds those of one pass, with all intermediate results at
fixed places, and makes them again: CUDA graphs, on a CPU. What a pass decides by the numbers it
computes can't be on a tape; models in which that is seen are computed as before.
"""

from __future__ import annotations

import logging
import weakref
from bisect import insort
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from staffel.kernels import library
from staffel.model.attention import PackedStep, PagedAttention
from staffel.model.fuse import alike
from staffel.model.loader import CausalLM

log = logging.getLogger(__name__)

Ints = np.ndarray[Any, Any]

MOST = 32
"""Sequences of the largest recorded step. From there on the interpreter's share is small."""
ARENA = 64 << 20
"""Bytes for intermediate results; only those that are used take memory."""
_LINE = 64
_SLOW = 0.2
"""Seconds of a step of which the interpreter's share is a few hundredths."""

_aten = torch.ops.aten
_MAKES_ROOM = {
    _aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided,
}  # fmt: skip
_DEPENDS = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
}
_INTO: dict[Any, Callable[..., Any]] = {_aten.add.Tensor: torch.add, _aten.mul.Tensor: torch.mul}
"""Operations that are frequent, and how to let them write into a place."""


class Unrecordable(Exception):
    """The pass can't be made again from a tape."""


# ---- memory


class Arena:
    """Memory that tensors are placed in, and which is used again as they are freed."""

    def __init__(self, size: int) -> None:
        room = np.empty(size + _LINE, np.uint8)
        start = -room.ctypes.data % _LINE
        self._bytes = room[start : start + size]
        self._whole = torch.from_numpy(self._bytes).untyped_storage()
        self._free = [(0, size)]
        """Where pieces that are free begin and end, in order."""

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Room for it, with its shape and strides, until the last view of that is gone.

        Raises:
            Unrecordable: the arena is full.
        """
        start, end = self._take(max(_extent(tensor), 1))
        piece = self._bytes[start:end]
        weakref.finalize(piece, self._give, start, end).atexit = False
        flat = torch.from_numpy(piece).view(tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride())

    def at_its_place(self, tensor: Tensor) -> Tensor:
        """The same memory, without keeping it from being used again; others as they are."""
        offset = tensor.data_ptr() - self._bytes.ctypes.data
        if not 0 <= offset < self._bytes.size:
            return tensor
        place = torch.empty(0, dtype=tensor.dtype)
        return place.set_(
            self._whole, offset // tensor.element_size(), tensor.shape, tensor.stride()
        )

    def _take(self, size: int) -> tuple[int, int]:
        size = -(-size // _LINE) * _LINE
        for i, (start, end) in enumerate(self._free):
            if end - start >= size:
                self._free[i : i + 1] = [(start + size, end)] if end - start > size else []
                return start, start + size
        raise Unrecordable(f"its intermediate results take more than {self._bytes.size} bytes")

    def _give(self, start: int, end: int) -> None:
        insort(self._free, (start, end))
        i = self._free.index((start, end))
        if i + 1 < len(self._free) and self._free[i + 1][0] == end:
            end = self._free.pop(i + 1)[1]
        if i > 0 and self._free[i - 1][1] == start:
            start = self._free.pop(i - 1)[0]
            i -= 1
        self._free[i] = (start, end)


def _extent(tensor: Tensor) -> int:
    """Bytes from its first element to its last, gaps included."""
    if tensor.numel() == 0:
        return 0
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


# ---- recording


class _Recording(TorchDispatchMode):
    """Notes what a pass does, and puts its results into the arena."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self._arena = arena

    # A `library.Recorder`

    def note(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.calls.append((function, arguments))

    def spoil(self, reason: str) -> None:
        raise Unrecordable(reason)

    # torch's operations

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if _decides(func, args):
            raise Unrecordable(f"{func} depends on numbers that are computed")
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = {_memory(x) for x in _tensors((args, kwargs))}
        if func._schema.is_mutable:
            if any(_memory(x) not in given for x in _tensors(result)):
                raise Unrecordable(f"{func} changes its arguments, and gives something new")
            self._note_operation(partial(func, **self._kept(kwargs)), self._kept(args))
            return result
        results, form = tree_flatten(result)
        places: dict[int, Tensor] = {}
        for i, one in enumerate(results):
            if isinstance(one, Tensor) and _memory(one) not in given:
                results[i] = self._arena.empty_like(one).copy_(one)
                places[i] = self._arena.at_its_place(results[i])
        if places and func.overloadpacket not in _MAKES_ROOM:
            self._note_operation(*_again(func, self._kept(args), self._kept(kwargs), places))
        return tree_unflatten(results, form)

    def _note_operation(self, operation: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.calls.append((partial(_done, operation), args))

    def _kept(self, parts: Any) -> Any:
        return tree_map_only(Tensor, self._arena.at_its_place, parts)


def _decides(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether it lets numbers decide what is computed, or draws some."""
    if func is _aten.index.Tensor:  # its tag is for masks
        return any(x.dtype in (torch.bool, torch.uint8) for x in _tensors(args[1]))
    if func is _aten.dropout.default:
        return bool(args[2])  # in training alone
    return bool(_DEPENDS.intersection(func.tags))


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(parts: Any) -> list[Tensor]:
    return [x for x in tree_leaves(parts) if isinstance(x, Tensor)]


def _done(operation: Callable[..., Any], *args: Any) -> None:
    """Nothing is wrong, whatever it gives."""
    operation(*args)


def _again(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], places: dict[int, Tensor]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What does the operation again, with its results at their places; and its arguments.

    Args:
        places: of those of its results, by number, that aren't views of its arguments.
    """
    if func is _aten.clone.default:
        return places[0].copy_, (args[0],)
    if func in _INTO and isinstance(args[1], Tensor):
        return partial(_INTO[func], **kwargs, out=places[0]), args
    return partial(_copied, func, kwargs, places), args


def _copied(func: Any, kwargs: dict[str, Any], places: dict[int, Tensor], *args: Any) -> None:
    results = tree_leaves(func(*args, **kwargs))
    for i, place in places.items():
        place.copy_(results[i])


# ---- tapes


class Tape:
    """A decode step of so many sequences."""

    def __init__(self, model: CausalLM, size: int, arena: Arena) -> None:
        """Record it: a pass at position 0, which the attention has been told of (`begin`).

        Raises:
            Unrecordable: it can't be made again.
        """
        self._ids = torch.zeros(size, dtype=torch.int64)
        self._positions = torch.zeros(size, dtype=torch.int64)
        keep = torch.arange(size)
        recording = _Recording(arena)
        with recording, library.recording(recording):
            logits = model.logits(self._ids, self._positions, keep)
        self._logits = arena.at_its_place(logits)
        self._calls = recording.calls

    def play(self, ids: Any, positions: Any) -> Tensor:
        """Logits [size, vocab], which hold until a tape is played again.

        Raises:
            IndexError: an id is outside the vocabulary.
        """
        self._ids.copy_(torch.as_tensor(ids))
        self._positions.copy_(torch.as_tensor(positions))
        for function, arguments in self._calls:
            if function(*arguments):  # of all of them, only lookups of ids ever complain
                raise IndexError("ids: one is outside the vocabulary")
        return self._logits


class Tapes:
    """One for each size of step up to `MOST`, of a model whose attention is in C."""

    @torch.inference_mode()
    def __init__(self, model: CausalLM, attention: PagedAttention, most: int) -> None:
        """Record and try them, on a KV block that nobody uses yet."""
        self._tapes: list[Tape] = []
        self._computed_by = model, attention  # tapes hold addresses of what they are made of
        arena = Arena(ARENA)
        try:
            for size in range(1, min(most, MOST) + 1):
                self._tapes.append(_recorded(model, attention, size, arena))
        except Unrecordable as reason:
            log.info("steps of %d or more sequences aren't recorded: %s", len(self) + 1, reason)

    def logits(self, step: PackedStep, ids: Ints, keep: list[int]) -> Tensor | None:
        """[len(keep), vocab] of the packed tokens `keep` of `ids`; None: there is no such tape."""
        if len(ids) > len(self) or not step.only_decodes(keep):
            return None
        return self._tapes[len(ids) - 1].play(ids, step.positions)

    def __len__(self) -> int:
        return len(self._tapes)


def _recorded(model: CausalLM, attention: PagedAttention, size: int, arena: Arena) -> Tape:
    """A tape. One of each few sizes is tried, on a step that it wasn't recorded of.

    Raises:
        Unrecordable: there is none, it isn't right, or it isn't worth having one.
    """
    tried = size & (size - 1) == 0
    ids = _begin(model, attention, size, 0)
    if tried:
        started = perf_counter()
        model.logits(*ids)
        if perf_counter() - started > _SLOW:
            raise Unrecordable("they take so long that it would gain nothing")
    tape = Tape(model, size, arena)
    if tried:
        another = _begin(model, attention, size, 1)
        if not alike(tape.play(*another[:2]).clone(), model.logits(*another)):
            raise Unrecordable("played again, a step doesn't give what the model gives")
    return tape


def _begin(
    model: CausalLM, attention: PagedAttention, size: int, position: int
) -> tuple[Ints, Ints, Ints]:
    """Begin a step at that position; its ids and positions, and that all are kept."""
    numbers = np.arange(size)
    positions = np.full(size, position)
    tables = np.zeros((size, position + 1), np.int64)  # enough, however small a block
    attention.begin(PackedStep(tables, positions, np.ones(size, np.int64)))
    return (numbers * 7919 + position) % model.vocab_size, positions, numbers
