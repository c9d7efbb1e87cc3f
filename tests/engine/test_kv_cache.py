"""The block manager: who holds which block, and what may be found again."""

from __future__ import annotations

import pytest

from engine.kv_cache import Allocation, BlockManager, OutOfBlocks

SIZE = 4


def written(manager: BlockManager, tokens: list[int]) -> Allocation:
    """A sequence whose `tokens` have all been computed and published."""
    allocation = manager.match(tokens)
    manager.extend(allocation, len(tokens))
    manager.publish(allocation, lambda start, stop: tokens[start:stop], len(tokens))
    return allocation


def test_a_published_prefix_is_shared_by_block_number() -> None:
    manager = BlockManager(8, SIZE, "writer")
    first = written(manager, list(range(10)))
    second = manager.match([*range(8), 99, 98])
    assert second.blocks == first.blocks[:2]
    manager.check([first, second])


def test_at_least_one_token_is_left_to_compute() -> None:
    manager = BlockManager(8, SIZE, "writer")
    written(manager, list(range(8)))
    assert len(manager.match(list(range(8))).blocks) == 1
    assert len(manager.match(list(range(9))).blocks) == 2


def test_nothing_is_found_before_the_step_that_writes_it_has_finished() -> None:
    manager = BlockManager(8, SIZE, "writer")
    running = manager.match(list(range(8)))
    manager.extend(running, 8)
    assert manager.match(list(range(8))).blocks == []


def test_a_partly_filled_block_is_never_published() -> None:
    manager = BlockManager(8, SIZE, "writer")
    tokens = list(range(12))
    allocation = manager.match(tokens)
    manager.extend(allocation, 12)
    manager.publish(allocation, lambda start, stop: tokens[start:stop], 7)
    assert len(manager.match(tokens).blocks) == 1


def test_a_block_is_found_only_behind_the_same_prefix() -> None:
    manager = BlockManager(8, SIZE, "writer")
    written(manager, [1, 2, 3, 4, 5, 6, 7, 8])
    assert manager.match([9, 9, 9, 9, 5, 6, 7, 8, 0]).blocks == []
    assert manager.match([5, 6, 7, 8, 0]).blocks == []


def test_another_writer_or_process_names_blocks_differently() -> None:
    names = []
    for writer in ("a", "b", "b"):
        names.append(written(BlockManager(4, SIZE, writer), [1, 2, 3, 4, 5]).names[0])
    assert len(set(names)) == 3, "the writer and a key of each manager's own are part of the name"
    assert all(len(n) * 8 >= 128 for n in names)


def test_ids_that_agree_in_their_low_bits_are_told_apart() -> None:
    manager = BlockManager(4, SIZE, "writer")
    written(manager, [1, 2, 3, 4, 5])
    assert manager.match([1 + (1 << 16), 2, 3, 4, 5]).blocks == []
    assert manager.match([1 + (1 << 32), 2, 3, 4, 5]).blocks == []


def test_extend_takes_nothing_when_it_cannot_take_all() -> None:
    manager = BlockManager(3, SIZE, "writer")
    allocation = Allocation()
    manager.extend(allocation, 5)
    with pytest.raises(OutOfBlocks):
        manager.extend(allocation, 17)
    assert len(allocation.blocks) == 2 and manager.available == 1
    manager.check([allocation])


def test_blocks_without_a_name_go_first_then_the_least_recently_used() -> None:
    manager = BlockManager(4, SIZE, "writer")
    old, new = written(manager, [1, 1, 1, 1, 0]), written(manager, [2, 2, 2, 2, 0])
    manager.release(old)
    manager.release(new)
    taken = Allocation()
    manager.extend(taken, 3 * SIZE)  # two unnamed blocks, then the older named one
    assert manager.match([1, 1, 1, 1, 0]).blocks == []
    assert len(manager.match([2, 2, 2, 2, 0]).blocks) == 1


def test_the_end_of_a_sequence_is_evicted_before_its_start() -> None:
    manager = BlockManager(3, SIZE, "writer")
    manager.release(written(manager, list(range(12))))
    manager.extend(Allocation(), SIZE)
    assert len(manager.match(list(range(12))).blocks) == 2


def test_the_same_prefix_written_twice_is_published_once() -> None:
    manager = BlockManager(4, SIZE, "writer")
    tokens = [1, 2, 3, 4, 5]
    one, two = manager.match(tokens), manager.match(tokens)  # admitted in one step: neither finds the other
    for allocation in (one, two):
        manager.extend(allocation, 5)
    for allocation in (one, two):
        manager.publish(allocation, lambda start, stop: tokens[start:stop], 5)
    manager.check([one, two])
    assert manager.match(tokens).blocks == one.blocks[:1]


def test_check_catches_books_that_do_not_balance() -> None:
    manager = BlockManager(4, SIZE, "writer")
    allocation = Allocation()
    manager.extend(allocation, 8)
    with pytest.raises(AssertionError, match="reference counts"):
        manager.check([])
    shared = Allocation(blocks=list(allocation.blocks))
    for block in shared.blocks:
        manager._references[block] += 1
    with pytest.raises(AssertionError, match="unpublished block is shared"):
        manager.check([allocation, shared])
