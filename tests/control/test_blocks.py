"""Allocation, sharing and reuse of blocks."""

from __future__ import annotations

import random

from staffel.control.affinity import PrefixIndex, prompt_hashes
from staffel.control.blocks import BlockManager, block_hash, extend_hashes


def hashes(ids: list[int], size: int = 2) -> list[bytes]:
    names: list[bytes] = []
    extend_hashes(names, ids, size, len(ids) // size)
    return names


def test_hash_depends_on_all_before() -> None:
    assert hashes([1, 2, 3, 4])[1] != hashes([9, 2, 3, 4])[1]
    assert hashes([1, 2, 3, 4]) == [
        block_hash(b"", [1, 2]),
        block_hash(block_hash(b"", [1, 2]), [3, 4]),
    ]


def test_ids_are_told_apart_whatever_their_digits() -> None:
    assert block_hash(b"", [1, 23]) != block_hash(b"", [12, 3])


def test_released_named_blocks_are_found_again_and_others_are_not() -> None:
    manager = BlockManager(4, 2)
    names = hashes([1, 2, 3, 4])
    table = manager.take([], 3)
    for block, name in zip(table, names, strict=False):
        manager.register(block, name)
    manager.release(table)
    assert (manager.free, manager.cached) == (2, 2)
    assert manager.match(names) == table[:2]
    assert manager.match([b"other", *names]) == []


def test_least_recently_used_prefix_gives_way_tail_first() -> None:
    manager = BlockManager(4, 2)
    old, new = hashes([1, 2, 3, 4]), hashes([5, 6, 7, 8])
    for names in (old, new):
        table = manager.take([], 2)
        for block, name in zip(table, names, strict=True):
            manager.register(block, name)
        manager.release(table)
    manager.take([], 1)
    assert len(manager.match(old)) == 1
    assert len(manager.match(new)) == 2


def test_shared_blocks_stay_until_the_last_holder_lets_go() -> None:
    manager = BlockManager(3, 2)
    name = hashes([1, 2])
    first = manager.take([], 1)
    manager.register(first[0], name[0])
    second = manager.take(manager.match(name), 1)
    manager.release(first)
    assert manager.available == 1
    manager.release(second)
    assert manager.available == 3


def test_can_take_counts_revived_blocks() -> None:
    manager = BlockManager(2, 2)
    names = hashes([1, 2])
    table = manager.take([], 1)
    manager.register(table[0], names[0])
    manager.release(table)
    assert manager.can_take(manager.match(names), 1)
    assert not manager.can_take(manager.match(names), 2)


def test_books_balance_under_random_use() -> None:
    rng = random.Random(0)
    manager = BlockManager(20, 2)
    held: list[list[int]] = []
    for _ in range(3000):
        if held and rng.random() < 0.5:
            manager.release(held.pop(rng.randrange(len(held))))
        else:
            names = hashes([rng.randrange(2) for _ in range(rng.randrange(2, 12))])
            shared = manager.match(names)
            if manager.can_take(shared, len(names) - len(shared)):
                table = manager.take(shared, len(names) - len(shared))
                for block, name in zip(table, names, strict=True):
                    manager.register(block, name)
                held.append(table)
        used = {block for table in held for block in table}
        assert manager.available == 20 - len(used)
    for table in held:
        manager.release(table)
    assert manager.available == 20


def test_prefix_index_forgets_the_least_recent_and_keeps_heads_longest() -> None:
    index = PrefixIndex(3)
    one, two = prompt_hashes([1] * 5, 2), prompt_hashes([2] * 5, 2)
    index.add(one)
    index.add(two)
    assert index.matched(two) == 2
    assert index.matched(one) == 1


def test_last_token_of_a_prompt_is_never_shared() -> None:
    assert len(prompt_hashes([1] * 4, 2)) == 1
    assert len(prompt_hashes([1] * 5, 2)) == 2
    assert prompt_hashes([1], 2) == []
