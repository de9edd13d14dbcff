"""KV on a GPU: what a peer in another process copies, beside a step that goes on."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest
import torch

from staffel.control.messages import KvRegion
from staffel.transfer import KvShape, attach, create

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SHAPE = KvShape(
    slots=5, num_blocks=6, layers=2, block_size=4, kv_heads=3, k_width=8, v_width=6,
    dtype=torch.bfloat16,
)  # fmt: skip
OWNER = """
import sys, msgspec, torch
from tests.transfer.test_cuda import SHAPE
from staffel.transfer import create
memory = create(SHAPE, torch.device("cuda"))
memory.k.copy_(torch.arange(memory.k.numel(), device="cuda").view_as(memory.k) % 251)
memory.v.copy_(torch.arange(memory.v.numel(), device="cuda").view_as(memory.v) % 127)
memory.set_generation(3, 17)
torch.cuda.synchronize()
print(msgspec.json.encode(memory.region).decode(), flush=True)
sys.stdin.readline()
"""


def numbers(like: torch.Tensor, modulus: int) -> torch.Tensor:
    return (torch.arange(like.numel(), device="cuda").view_as(like) % modulus).to(like.dtype)


def test_another_process_reads_it() -> None:
    own = create(SHAPE, torch.device("cuda"))
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        region = msgspec.json.decode(owner.stdout.readline(), type=KvRegion)
        peer = attach(region, own)
        peer.read_blocks([5, 0], [1, 2])
        assert 0 < peer.finish() < 1
        assert peer.confirm(3, 17)
        assert not peer.confirm(3, 18)
        for cache, modulus in ((own.k, 251), (own.v, 127)):
            theirs = numbers(cache, modulus)
            assert torch.equal(cache[[1, 2]], theirs[[5, 0]])
            assert not cache[[0, 3, 4, 5]].any()
        peer.close()
        owner.stdin.write("\n")
    own.close()


def test_the_own_process_reads_it_too() -> None:
    own, source = (create(SHAPE, torch.device("cuda")) for _ in range(2))
    source.k.fill_(7)
    peer = attach(source.region, own)
    peer.read_blocks([1], [4])
    peer.finish()
    assert not peer.confirm(0, 1)
    assert (own.k[4] == 7).all()
    for memory in (peer, own, source):
        memory.close()


def test_what_is_closed_is_given_back() -> None:
    before = torch.cuda.memory_allocated()
    memory = create(SHAPE, torch.device("cuda"))
    assert torch.cuda.memory_allocated() > before
    memory.close()
    memory.close()
    assert torch.cuda.memory_allocated() == before
