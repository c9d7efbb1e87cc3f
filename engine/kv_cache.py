"""Paged KV cache bookkeeping with prefix caching. Torch-free: it deals in block numbers; the host holds the tensors.

A full block is named by a keyed hash over what wrote it, the block before it and its own whole token ids; only blocks
whose step has finished are published under their name. A block nobody refers to keeps its content until it is needed,
least recently used first.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


class OutOfBlocks(Exception):
    """No block is free or can be evicted."""


@dataclass(slots=True)
class Allocation:
    """A sequence's blocks, in order. `names` holds the hashes of its leading full blocks, as far as they are known."""

    blocks: list[int] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)
    published: int = 0  # leading blocks published or taken from the cache


class BlockManager:
    """Blocks of one pool. Reference counts say who reads a block; free blocks are those with none.

    Paired verbs: `match`/`extend` take references, `release` gives them back and `trim` the last of them.
    """

    def __init__(self, blocks: int, block_size: int, writer_hash: str) -> None:
        self.block_size = block_size
        self.total = blocks
        self._key = secrets.token_bytes(32)  # names cannot be predicted from outside
        self._writer = writer_hash.encode()
        self._references = [0] * blocks
        self._free: OrderedDict[int, None] = OrderedDict((b, None) for b in range(blocks))  # least recently used first
        self._by_name: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}

    @property
    def available(self) -> int:
        """Blocks that could be handed out now, cached but unused ones included."""
        return len(self._free)

    def match(self, token_ids: Sequence[int]) -> Allocation:
        """Takes the longest published prefix of `token_ids`, always leaving at least one token to compute."""
        allocation = Allocation()
        size = self.block_size
        for i in range((len(token_ids) - 1) // size):
            span = _packed(token_ids[i * size : (i + 1) * size])
            name = self._name(allocation.names[-1] if allocation.names else b"", span)
            block = self._by_name.get(name)
            if block is None:
                break
            self._take(block)
            allocation.blocks.append(block)
            allocation.names.append(name)
        allocation.published = len(allocation.blocks)
        return allocation

    def extend(self, allocation: Allocation, tokens: int) -> None:
        """Gives `allocation` room for `tokens` tokens. Raises OutOfBlocks, having taken nothing."""
        missing = -(-tokens // self.block_size) - len(allocation.blocks)
        if missing > len(self._free):
            raise OutOfBlocks(f"{missing} blocks are needed and {len(self._free)} are free")
        for _ in range(missing):
            block = next(iter(self._free))
            self._forget(block)
            self._take(block)
            allocation.blocks.append(block)

    def publish(self, allocation: Allocation, tokens: Callable[[int, int], Sequence[int]], written: int) -> None:
        """Names every full block among the first `written` tokens. Call only once the step that wrote them has ended.

        `tokens(start, stop)` gives the sequence's token ids; it is asked only for blocks that became full.
        """
        size = self.block_size
        for i in range(allocation.published, written // size):
            span = _packed(tokens(i * size, (i + 1) * size))
            name = self._name(allocation.names[-1] if allocation.names else b"", span)
            allocation.names.append(name)
            block = allocation.blocks[i]
            if name not in self._by_name and block not in self._name_of:
                self._by_name[name], self._name_of[block] = block, name
            allocation.published = i + 1

    def trim(self, allocation: Allocation, tokens: int) -> None:
        """Gives back the blocks past the first `tokens` tokens. They were never published."""
        keep = -(-tokens // self.block_size)
        assert allocation.published <= keep, "a published block is not trimmed"
        self._give_back(allocation.blocks[keep:])
        del allocation.blocks[keep:]

    def release(self, allocation: Allocation) -> None:
        """Gives back every reference. Later blocks of a sequence are evicted before earlier ones."""
        self._give_back(allocation.blocks)
        allocation.blocks.clear()
        allocation.names.clear()
        allocation.published = 0

    def check(self, allocations: Sequence[Allocation]) -> None:
        """Raises AssertionError unless the books balance with the allocations alive."""
        counted = [0] * self.total
        for allocation in allocations:
            assert len(set(allocation.blocks)) == len(allocation.blocks), "a sequence holds a block twice"
            for block in allocation.blocks:
                counted[block] += 1
        assert counted == self._references, "reference counts are off"
        assert {b for b in range(self.total) if counted[b] == 0} == set(self._free), "the free list is off"
        assert {b: n for n, b in self._by_name.items()} == self._name_of, "names are not one to one"
        assert all(a.published <= len(a.blocks) for a in allocations), "more is published than a sequence holds"
        for block, count in enumerate(counted):
            assert count <= 1 or block in self._name_of, "an unpublished block is shared"

    def _give_back(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if block not in self._name_of:  # nothing to find in it again: the first to be handed out
                    self._free.move_to_end(block, last=False)

    def _take(self, block: int) -> None:
        if self._references[block] == 0:
            del self._free[block]
        self._references[block] += 1

    def _forget(self, block: int) -> None:
        name = self._name_of.pop(block, None)
        if name is not None:
            del self._by_name[name]

    def _name(self, parent: bytes, span: bytes) -> bytes:
        """160 bits over the writer, everything before the block and its own token ids."""
        if parent:
            return hashlib.blake2b(parent + span, key=self._key, digest_size=20, person=b"next").digest()
        writer = len(self._writer).to_bytes(4, "little") + self._writer
        return hashlib.blake2b(writer + span, key=self._key, digest_size=20, person=b"first").digest()


def _packed(token_ids: Sequence[int]) -> bytes:
    return array("q", token_ids).tobytes()
