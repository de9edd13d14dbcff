"""Packed weights in a file of the cache: made once, mapped by every instance of the host.

The file is the tensors' bytes, an index of them as JSON, and the index's length in 8 bytes. It is
mapped privately and never written, so all processes look at the same pages.
"""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from staffel.model.hub import cache_folder

log = logging.getLogger(__name__)

_ALIGNED = 64
"""Bytes of a cache line: tensors begin at one."""

Make = Callable[[], Iterable[Tensor]]


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    offset: int


def stored(source: Path, variant: str, version: str, make: Make) -> list[Tensor]:
    """The tensors that `make` gives, from the cache; made and put there if they aren't yet.

    Args:
        source: the model's folder. A change of its weights or config makes them anew.
        variant: kinds of one model that lie side by side.
        version: everything else that the tensors depend on. Older versions are removed.

    Where the cache can't be written they are made in memory, and a line of the log says so.
    """
    path = _path(source, variant, version)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _one_process_at_a_time(path.parent / ".lock"):
            if not path.is_file():
                _remove_older(path)
                _write(path, make())
        return _map(path)
    except OSError as error:
        log.warning("packed weights are kept in memory, not in %s: %s", path, error)
        return list(make())


def _path(source: Path, variant: str, version: str) -> Path:
    """A name that older versions share up to the last dash."""
    files = sorted([*source.glob("*.safetensors"), source / "config.json"])
    stats = [(file.name, (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files]
    where, what = _digest(str(source.resolve())), _digest(repr((stats, version)))
    return cache_folder() / "packed" / f"{source.name}-{where}-{variant}-{what}"


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=8).hexdigest()


@contextmanager
def _one_process_at_a_time(lock: Path) -> Iterator[None]:
    """Others wait, and then find the file. The lock goes with the process, however it ends."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remove_older(path: Path) -> None:
    for older in path.parent.glob(path.name.rpartition("-")[0] + "-*"):
        older.unlink()  # whoever has it mapped keeps it


def _write(path: Path, tensors: Iterable[Tensor]) -> None:
    """Write beside the final place and rename, so that a file of that name is always whole."""
    work = path.with_name(f".{path.name}.partial")
    try:
        with work.open("wb") as file:
            index = [_append(file, tensor) for tensor in tensors]
            text = msgspec.json.encode(index)
            file.write(text + len(text).to_bytes(8, "little"))
        work.rename(path)
    finally:
        work.unlink(missing_ok=True)


def _append(file, tensor: Tensor) -> _Entry:
    file.write(bytes(-file.tell() % _ALIGNED))
    offset = file.tell()
    tensor.numpy().tofile(file)
    return _Entry(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset)


def _map(path: Path) -> list[Tensor]:
    whole = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    size = int.from_bytes(whole[-8:].numpy().tobytes(), "little")
    index = msgspec.json.decode(whole[-8 - size : -8].numpy().tobytes(), type=list[_Entry])
    return [_tensor(whole, entry) for entry in index]


def _tensor(whole: Tensor, entry: _Entry) -> Tensor:
    dtype = getattr(torch, entry.dtype)
    stop = entry.offset + torch.Size(entry.shape).numel() * dtype.itemsize
    return whole[entry.offset : stop].view(dtype).view(entry.shape)
