from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)

from ssd_pipe.engine.blocks import BlockManager, BlockTable, NoFreeBlocks
from ssd_pipe.errors import ConfigError, ResourceError


def refs(manager: BlockManager) -> list[int]:
    """Tables that hold each block."""
    return list(manager._refs)


def state(manager: BlockManager, block: int) -> str:
    """Of the three states a block can be in; raises where it is in none or in several."""
    states = {
        "held": manager._refs[block] > 0,
        "cached": block in manager._cached,
        "free": block in manager._free,
    }
    (only,) = [name for name, holds in states.items() if holds]
    return only


@dataclass(eq=False)
class Sequence:
    tokens: list[int]
    table: BlockTable = field(default_factory=BlockTable)
    computed: int = 0


class Blocks(RuleBasedStateMachine):
    """Sequences come, grow, speculate and leave; a model memory holds their KV.

    The model writes every computed token into a simulated KV memory, so that a block handed out as
    a known prefix can be checked against what was really written to it.
    """

    sequences = Bundle("sequences")
    # Two token values and small blocks make equal prefixes common.
    some_tokens = st.lists(st.sampled_from([0, 0, 0, 1]), min_size=1, max_size=12)

    @initialize(num_blocks=st.integers(1, 8), size=st.sampled_from([1, 2, 4]), on=st.booleans())
    def start(self, num_blocks: int, size: int, on: bool) -> None:
        self.manager = BlockManager(num_blocks, size, prefix_caching=on)
        self.memory: dict[tuple[int, int], tuple[int, ...]] = {}
        self.live: list[Sequence] = []
        self.read_only: set[int] = set()

    def compute(self, seq: Sequence, tokens: list[int], end: int) -> None:
        """Write positions computed..end: a slot's content is the whole prefix, as KV's is."""
        size = self.manager.block_size
        for pos in range(seq.computed, end):
            block = seq.table.blocks[pos // size]
            assert block not in self.read_only, "a registered block is written"
            assert refs(self.manager)[block] == 1, "a shared block is written"
            self.memory[block, pos % size] = tuple(tokens[: pos + 1])

    def contents_match(self, blocks: list[int], tokens: list[int]) -> bool:
        size = self.manager.block_size
        return all(
            self.memory[block, j] == tuple(tokens[: i * size + j + 1])
            for i, block in enumerate(blocks)
            for j in range(size)
        )

    def snapshot(self) -> object:
        m = self.manager
        return (
            [state(m, b) for b in range(m.num_blocks)],
            refs(m),
            [list(s.table.blocks) for s in self.live],
            (m.num_free, m.query_tokens, m.hit_tokens),
        )

    @rule(target=sequences, tokens=some_tokens, first_chunk=st.integers(0, 14))
    def begin(self, tokens: list[int], first_chunk: int) -> Sequence:
        m, seq = self.manager, Sequence(list(tokens))
        cached = m.match_prefix(tokens)
        covered = len(cached) * m.block_size
        assert covered < len(tokens)
        assert self.contents_match(cached, tokens)
        wanted = max(covered, min(first_chunk, len(tokens)))
        before = self.snapshot()
        try:
            blocks = m.allocate(seq.table, tokens, cached, wanted)
        except NoFreeBlocks:
            assert self.snapshot() == before
            assert seq.table == BlockTable()
            return seq
        assert blocks == seq.table.blocks
        assert blocks[: len(cached)] == cached
        assert len(blocks) == m.blocks_for(wanted)
        self.read_only -= set(blocks[len(cached) :])
        seq.computed = covered
        self.live.append(seq)
        return seq

    @rule(seq=sequences, more=some_tokens, rejected=some_tokens)
    def step(self, seq: Sequence, more: list[int], rejected: list[int]) -> None:
        """Feed what is committed, more accepted tokens, and proposals that are then rejected."""
        if seq not in self.live:
            return
        m = self.manager
        good = seq.tokens + more
        # The last committed token is never computed yet, so at most its predecessors are.
        fed = good[:-1] + rejected
        held, before = list(seq.table.blocks), self.snapshot()
        try:
            new = m.ensure(seq.table, len(fed))
        except NoFreeBlocks:
            assert m.blocks_for(len(fed)) - len(held) > m.num_free
            assert self.snapshot() == before
            return
        assert seq.table.blocks == held + new
        self.read_only -= set(new)
        self.compute(seq, fed, len(fed))
        seq.tokens, seq.computed = good, len(good) - 1
        m.commit(seq.table, seq.tokens, seq.computed)
        if m.prefix_caching:
            full = seq.computed // m.block_size
            self.read_only |= set(seq.table.blocks[:full])
            assert len(seq.table.digests) == full

    @rule(seq=consumes(sequences))
    def leave(self, seq: Sequence) -> None:
        if seq not in self.live:
            return
        self.live.remove(seq)
        self.manager.release(seq.table)
        assert seq.table == BlockTable()

    @rule(seq=sequences)
    def known_prefix_is_found(self, seq: Sequence) -> None:
        m = self.manager
        if seq not in self.live or not m.prefix_caching:
            return
        found = m.match_prefix(seq.tokens)
        assert self.contents_match(found, seq.tokens)

    @invariant()
    def every_block_has_one_state(self) -> None:
        m = self.manager
        holders = Counter(b for seq in self.live for b in seq.table.blocks)
        assert refs(m) == [holders[b] for b in range(m.num_blocks)]
        states = Counter(state(m, b) for b in range(m.num_blocks))
        assert states["held"] == len(holders)
        assert states["free"] + states["cached"] == m.num_free
        assert all(len(set(s.table.blocks)) == len(s.table.blocks) for s in self.live)
        self.read_only &= set(range(m.num_blocks)) - {
            b for b in range(m.num_blocks) if state(m, b) == "free"
        }

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        for seq in self.live:
            self.manager.release(seq.table)
        self.live.clear()
        assert self.manager.num_free == self.manager.num_blocks
        whole = BlockTable()
        self.manager.ensure(whole, self.manager.num_blocks * self.manager.block_size)
        assert sorted(whole.blocks) == list(range(self.manager.num_blocks))


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)


def run_once(manager: BlockManager, tokens: list[int]) -> BlockTable:
    table = BlockTable()
    manager.allocate(table, tokens, manager.match_prefix(tokens))
    manager.commit(table, tokens, len(tokens))
    return table


def test_second_request_shares_the_first_ones_blocks() -> None:
    manager = BlockManager(8, 4)
    prompt = list(range(10))
    first = run_once(manager, prompt)
    second = run_once(manager, prompt)
    assert second.blocks[:2] == first.blocks[:2]
    assert second.blocks[2] != first.blocks[2]
    assert [refs(manager)[b] for b in first.blocks] == [2, 2, 1]
    assert (manager.hit_tokens, manager.query_tokens) == (8, 20)


def test_one_token_is_always_left_to_compute() -> None:
    manager = BlockManager(8, 4)
    manager.release(run_once(manager, list(range(8))))
    assert len(manager.match_prefix(list(range(8)))) == 1
    assert len(manager.match_prefix(list(range(9)))) == 2


def test_speculative_tokens_are_never_registered() -> None:
    manager = BlockManager(8, 4)
    table = BlockTable()
    committed = [1, 2, 3]
    manager.ensure(table, 8)
    manager.commit(table, committed, 3)
    manager.release(table)
    assert [state(manager, b) for b in range(8)] == ["free"] * 8


def test_a_sequences_tail_is_evicted_before_its_head_and_the_oldest_first() -> None:
    manager = BlockManager(6, 2)
    old, young = [1] * 6, [2] * 6
    manager.release(run_once(manager, old))
    manager.release(run_once(manager, young))
    assert [state(manager, b) for b in range(6)] == ["cached"] * 6
    matches = []
    table = BlockTable()
    for blocks in range(1, 6):
        manager.ensure(table, 2 * blocks)
        matches.append(
            (len(manager.match_prefix([*old, 9])), len(manager.match_prefix([*young, 9])))
        )
    assert matches == [(2, 3), (1, 3), (0, 3), (0, 2), (0, 1)]


def test_use_makes_a_cached_prefix_young_again() -> None:
    manager = BlockManager(4, 2)
    for prompt in ([1] * 4, [2] * 4):
        manager.release(run_once(manager, prompt))
    again = BlockTable()
    manager.allocate(again, [1] * 4, manager.match_prefix([1] * 5), num_tokens=4)
    manager.release(again)
    manager.ensure(BlockTable(), 4)
    assert len(manager.match_prefix([1] * 5)) == 2
    assert manager.match_prefix([2] * 5) == []


def test_cached_blocks_of_the_request_itself_do_not_count_as_room() -> None:
    manager = BlockManager(3, 2)
    manager.release(run_once(manager, [1] * 6))
    cached = manager.match_prefix([1] * 7)
    assert len(cached) == 3
    with pytest.raises(NoFreeBlocks, match="1 blocks needed, 0 free"):
        manager.allocate(BlockTable(), [1] * 7, cached)
    assert len(manager.match_prefix([1] * 7)) == 3
    assert issubclass(NoFreeBlocks, ResourceError)


def test_misuse_is_refused() -> None:
    manager = BlockManager(4, 2)
    table = run_once(manager, [1, 2, 3, 4, 5])
    with pytest.raises(ValueError, match="empty table"):
        manager.allocate(table, [1])
    stale = manager.match_prefix([1, 2, 3])
    manager.release(table)
    manager.ensure(BlockTable(), 8)  # evicts everything
    with pytest.raises(ValueError, match="no longer registered"):
        manager.allocate(BlockTable(), [1, 2, 3], stale)
    with pytest.raises(ValueError, match="full blocks committed"):
        manager.commit(BlockTable(), [1, 2], 2)
    with pytest.raises(ConfigError, match="num_blocks"):
        BlockManager(0, 2)
    with pytest.raises(ConfigError, match="block_size"):
        BlockManager(2, 0)
