"""Paged KV bookkeeping: which sequence owns which block, and which blocks hold a known prefix.

Every block is in exactly one state:

* *free*: nobody owns it and its contents mean nothing;
* *held*: in the tables of one or more sequences;
* *cached*: in no table, but its contents are known by a digest; it is given back to a sequence
  with the same prefix, or evicted (least recently used first) when free blocks run out.

Only a *registered* block, one that is full of committed and computed tokens, is ever shared, and a
registered block is never written again: tokens are appended beyond it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ssd_pipe.engine.hashing import ROOT_DIGEST, block_digest
from ssd_pipe.errors import ConfigError, ResourceError


class NoFreeBlocks(ResourceError):
    """More KV blocks were asked for than are free; nothing was changed.

    Attributes:
        needed: blocks asked for.
        free: blocks that were to be had.
    """

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"KV cache: {needed} blocks needed, {free} free")
        self.needed = needed
        self.free = free


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence.

    Attributes:
        blocks: block numbers in position order.
        digests: chained digests of the leading blocks that are committed; these are read-only.
    """

    blocks: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)


class BlockManager:
    """Owner of ``num_blocks`` KV blocks of ``block_size`` positions each.

    Knows nothing of sequences but their tables, so that the target's and the draft's KV use it
    alike. Not thread-safe.

    Attributes:
        query_tokens: prompt tokens looked up by ``allocate`` so far.
        hit_tokens: how many of them were found in cached blocks.
    """

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool = True) -> None:
        """Raises ConfigError for sizes below 1."""
        if num_blocks < 1:
            raise ConfigError("num_blocks", f"must be at least 1, got {num_blocks}")
        if block_size < 1:
            raise ConfigError("cache.block_size", f"must be at least 1, got {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.query_tokens = 0
        self.hit_tokens = 0
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._refs = [0] * num_blocks
        self._digest_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be had now, cached ones included."""
        return len(self._free) + len(self._cached)

    def free_beside(self, cached_blocks: Sequence[int]) -> int:
        """Blocks that can be had now besides these registered ones."""
        return self.num_free - sum(self._refs[b] == 0 for b in cached_blocks)

    def can_set_aside(self, reaches: Iterable[tuple[BlockTable, int]]) -> bool:
        """Whether tables may grow to so many positions without crowding anyone out: they take no
        more than half of what is free."""
        needed = sum(max(0, self.blocks_for(reach) - len(table.blocks)) for table, reach in reaches)
        return needed <= self.num_free // 2

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` positions take."""
        return -(-num_tokens // self.block_size)

    def match_prefix(self, tokens: Sequence[int]) -> list[int]:
        """Registered blocks that hold the longest known prefix of ``tokens``.

        They cover at most ``len(tokens) - 1`` positions, because at least one token must be
        computed to get logits. Takes no reference: pass the result to ``allocate`` before
        anything else is allocated.
        """
        found: list[int] = []
        if not self.prefix_caching:
            return found
        size = self.block_size
        digest = ROOT_DIGEST
        for end in range(size, len(tokens), size):
            digest = block_digest(digest, tokens[end - size : end])
            block = self._block_of.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def allocate(
        self,
        table: BlockTable,
        tokens: Sequence[int],
        cached_blocks: Sequence[int] = (),
        num_tokens: int | None = None,
    ) -> list[int]:
        """Fill an empty table: the ``cached_blocks`` that ``match_prefix`` found, then new blocks.

        Args:
            tokens: the sequence's tokens (for the hit counters).
            num_tokens: positions that need a block now, all of ``tokens`` by default.

        Returns:
            All blocks of the table.

        Raises:
            NoFreeBlocks: it does not fit; nothing was changed.
            ValueError: the table is not empty, or a cached block was evicted since.
        """
        if table.blocks:
            raise ValueError("allocate needs an empty table")
        digests = [d for d in (self._digest_of[b] for b in cached_blocks) if d is not None]
        if len(digests) != len(cached_blocks):
            raise ValueError("a cached block is no longer registered")
        covered = len(cached_blocks) * self.block_size
        wanted = max(len(tokens) if num_tokens is None else num_tokens, covered)
        needed = self.blocks_for(wanted) - len(cached_blocks)
        free = self.free_beside(cached_blocks)
        if needed > free:
            raise NoFreeBlocks(needed, free)
        for block in cached_blocks:
            if self._refs[block] == 0:
                del self._cached[block]
            self._refs[block] += 1
        table.blocks = [*cached_blocks, *(self._take() for _ in range(needed))]
        table.digests = digests
        self.query_tokens += len(tokens)
        self.hit_tokens += covered
        return list(table.blocks)

    def ensure(self, table: BlockTable, num_tokens: int) -> list[int]:
        """Append blocks until ``num_tokens`` positions fit; returns the appended ones.

        Raises NoFreeBlocks, with nothing changed, if they do not fit.
        """
        needed = self.blocks_for(num_tokens) - len(table.blocks)
        if needed > self.num_free:
            raise NoFreeBlocks(needed, self.num_free)
        new = [self._take() for _ in range(needed)]
        table.blocks.extend(new)
        return new

    def commit(self, table: BlockTable, tokens: Sequence[int], num_computed: int) -> None:
        """Register the full blocks among the first ``num_computed`` positions.

        Args:
            tokens: the sequence's committed tokens from position 0; never speculative ones.
            num_computed: leading positions whose KV is written, from these very tokens.

        Raises ValueError if the table has no block for a computed position.
        """
        if not self.prefix_caching:
            return
        size = self.block_size
        full = min(len(tokens), num_computed) // size
        if full > len(table.blocks):
            raise ValueError(f"{full} full blocks committed, table has {len(table.blocks)}")
        for i in range(len(table.digests), full):
            parent = table.digests[-1] if i else ROOT_DIGEST
            digest = block_digest(parent, tokens[i * size : (i + 1) * size])
            table.digests.append(digest)
            # Two sequences may compute the same prefix at the same time; one block speaks for it.
            if digest not in self._block_of:
                self._block_of[digest] = table.blocks[i]
                self._digest_of[table.blocks[i]] = digest

    def release(self, table: BlockTable) -> None:
        """Give back every block; registered ones stay cached, a sequence's tail evicted first."""
        for block in reversed(table.blocks):
            self._drop(block)
        table.blocks.clear()
        table.digests.clear()

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            digest = self._digest_of[block]
            if digest is not None:
                del self._block_of[digest]
                self._digest_of[block] = None
        self._refs[block] = 1
        return block

    def _drop(self, block: int) -> None:
        self._refs[block] -= 1
        if self._refs[block]:
            return
        if self._digest_of[block] is None:
            self._free.append(block)
        else:
            self._cached[block] = None
