"""KV memory that peers read: the layout, the copy, the generation words, and a clean end."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from staffel.config import ConfigError
from staffel.control.messages import KvRegion
from staffel.transfer import KvMemory, KvShape, Unreachable, attach, create, shm
from staffel.transfer.shm import words_bytes

SHAPE = KvShape(
    slots=5,
    num_blocks=6,
    layers=2,
    block_size=4,
    kv_heads=3,
    k_width=8,
    v_width=6,
    dtype=torch.float32,
)


@pytest.fixture
def own() -> Iterator[KvMemory]:
    memory = create(SHAPE)
    yield memory
    memory.close()


@pytest.fixture
def source() -> Iterator[KvMemory]:
    memory = create(msgspec.structs.replace(SHAPE, num_blocks=9, slots=700))
    memory.k.normal_()
    memory.v.normal_()
    yield memory
    memory.close()


def changed(region: KvRegion, **fields: object) -> KvRegion:
    return msgspec.structs.replace(region, **fields)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:staffel-kv")


def test_tensors_lie_where_the_region_says(source: KvMemory) -> None:
    region = source.region
    k_bytes, v_bytes = (x.numel() * x.element_size() for x in (source.k, source.v))
    words = 2 * 4096  # 700 words of 8 bytes, padded to a page
    assert region.size == words + k_bytes + v_bytes
    source.set_generation(699, 41)
    with open(f"/proc/{region.pid}/fd/{region.fd}", "rb") as file:
        data = file.read()
    assert int.from_bytes(data[699 * 8 : 700 * 8], "little") == 41
    assert data[words : words + k_bytes] == source.k.numpy().tobytes()
    assert data[words + k_bytes :] == source.v.numpy().tobytes()


def test_blocks_are_copied_and_no_others_touched(own: KvMemory, source: KvMemory) -> None:
    own.k.fill_(-1.0)
    own.v.fill_(-2.0)
    peer = attach(source.region, own)
    peer.read_blocks([8, 0, 3], [1, 5, 2])
    for theirs, ours in ((8, 1), (0, 5), (3, 2)):
        assert torch.equal(own.k[ours], source.k[theirs])
        assert torch.equal(own.v[ours], source.v[theirs])
    assert (own.k[[0, 3, 4]] == -1).all()
    assert (own.v[[0, 3, 4]] == -2).all()
    peer.close()


def test_half_precision_is_copied_bit_by_bit() -> None:
    shape = msgspec.structs.replace(SHAPE, dtype=torch.bfloat16)
    own, source = create(shape), create(shape)
    source.k.normal_()
    attach(source.region, own).read_blocks([2], [4])
    assert torch.equal(own.k[4], source.k[2])
    own.close()
    source.close()


def test_confirm_sees_the_generation_of_now(own: KvMemory, source: KvMemory) -> None:
    peer = attach(source.region, own)
    assert not peer.confirm(3, 17)
    source.set_generation(3, 17)
    assert peer.confirm(3, 17)
    assert not peer.confirm(2, 17)
    source.clear(3)
    assert not peer.confirm(3, 17)
    source.set_generation(3, 18)
    assert not peer.confirm(3, 17)
    peer.close()


def test_words_alone_can_be_shared() -> None:
    """As they are for KV that lies on a GPU."""
    shape = msgspec.structs.replace(SHAPE, num_blocks=0)
    own, source = create(shape), create(shape)
    assert source.region.size == words_bytes(SHAPE.slots)
    peer = attach(source.region, own)
    source.set_generation(4, 9)
    assert peer.confirm(4, 9)
    peer.close()
    own.close()
    source.close()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layers", 3),
        ("block_size", 8),
        ("kv_heads", 1),
        ("k_width", 16),
        ("v_width", 8),
        ("dtype", "bfloat16"),
    ],
)
def test_another_layout_is_refused_by_name(
    own: KvMemory, source: KvMemory, field: str, value: object
) -> None:
    with pytest.raises(ConfigError, match=field):
        attach(changed(source.region, **{field: value}), own)


def test_an_unknown_kind_is_refused(own: KvMemory, source: KvMemory) -> None:
    with pytest.raises(ConfigError, match="kind"):
        attach(changed(source.region, kind="pigeon"), own)


def test_what_is_not_the_announced_memory_is_unreachable(
    own: KvMemory, source: KvMemory, tmp_path: Path
) -> None:
    with pytest.raises(Unreachable):
        attach(changed(source.region, pid=2**22 - 1), own)  # no such process
    with pytest.raises(Unreachable):
        attach(changed(source.region, fd=10_000), own)
    with open(tmp_path / "other", "wb+") as other:
        other.truncate(source.region.size)
        with pytest.raises(Unreachable):
            attach(changed(source.region, fd=other.fileno()), own)
    with pytest.raises(Unreachable):  # another memory, of another size
        attach(changed(source.region, fd=own.region.fd), own)


OWNER = """
import sys, msgspec, torch
from staffel.transfer import KvShape, create
memory = create(KvShape(slots=5, num_blocks=6, layers=2, block_size=4, kv_heads=3, k_width=8,
                        v_width=6, dtype=torch.float32))
memory.k.fill_(5.0); memory.v.fill_(6.0); memory.set_generation(1, 9)
print(msgspec.json.encode(memory.region).decode(), flush=True)
sys.stdin.read()
"""


def test_another_process_is_read_and_its_death_is_survived(own: KvMemory) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        region = msgspec.json.decode(owner.stdout.readline(), type=KvRegion)
        peer = attach(region, own)
        peer.read_blocks([5], [0])
        assert (own.k[0] == 5).all()
        assert (own.v[0] == 6).all()
        assert 0 < peer.finish() < 1
        assert peer.finish() == 0
    finally:
        owner.kill()
        owner.communicate()
    # What was mapped stays whole: a read that goes on is right to its end.
    peer.read_blocks([4], [1])
    assert (own.k[1] == 5).all()
    assert peer.confirm(1, 9)
    peer.close()
    with pytest.raises(Unreachable):
        attach(region, own)


def test_nothing_is_left_open_or_mapped() -> None:
    gc.collect()
    before = descriptors(), mappings()
    own, source = create(SHAPE), create(SHAPE)
    peer = attach(source.region, own)
    peer.read_blocks([1], [1])
    assert mappings() > before[1]
    for closing in (peer, source, own):
        closing.close()
    assert (descriptors(), mappings()) == before
    own.close()  # twice does no harm


def test_a_refused_peer_leaves_nothing_open(own: KvMemory, source: KvMemory) -> None:
    before = descriptors(), mappings()
    with pytest.raises(Unreachable):
        attach(changed(source.region, fd=own.region.fd), own)
    assert (descriptors(), mappings()) == before


def test_too_much_memory_is_refused_before_anything_is_taken() -> None:
    before = descriptors()
    with pytest.raises(ConfigError, match="--kv-memory"):
        create(msgspec.structs.replace(SHAPE, num_blocks=2**40))
    assert descriptors() == before


# ---- memory that is left

GIB = 1 << 30


def fake_machine(root: Path, available_kib: int, group: str = ".", **files: str) -> Path:
    (root / "proc").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {available_kib} kB\n")
    folder = root / "sys/fs/cgroup" / group
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name.replace("memory_", "memory.")).write_text(text)
    return root


def test_without_a_container_it_is_the_machines(tmp_path: Path) -> None:
    assert shm._memory_left(fake_machine(tmp_path, 5 << 20)) == 5 * GIB


@pytest.mark.parametrize("version", [1, 2])
def test_in_a_container_it_is_what_the_limit_leaves(tmp_path: Path, version: int) -> None:
    """Of 3 GiB 1.75 are in use, of which a quarter of one is files that can be dropped."""
    usage, files = str(7 * GIB // 4), GIB // 4
    if version == 2:
        root = fake_machine(
            tmp_path, 9 << 20, memory_max=str(3 * GIB), memory_current=usage,
            memory_stat=f"anon 1\ninactive_file {files}\n",
        )  # fmt: skip
    else:
        root = fake_machine(
            tmp_path, 9 << 20, "memory", memory_limit_in_bytes=str(3 * GIB),
            memory_usage_in_bytes=usage, memory_stat=f"cache 1\ntotal_inactive_file {files}\n",
        )  # fmt: skip
    assert shm._memory_left(root) == 3 * GIB // 2


def test_a_container_without_a_limit(tmp_path: Path) -> None:
    root = fake_machine(
        tmp_path, 4 << 20, memory_max="max\n", memory_current="5", memory_stat="anon 1\n"
    )
    assert shm._memory_left(root) == 4 * GIB
