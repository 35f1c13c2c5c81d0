from __future__ import annotations

import mmap
import multiprocessing
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from ssd_pipe.engine.speculation_cache import Hit, SpeculationCache, size_bytes
from ssd_pipe.errors import ConfigError, ResourceError

SLOTS, ENTRIES, K, VOCAB = 2, 6, 4, 1000
BIG = 2**64 - 1


def pair(buffer: object | None = None) -> tuple[SpeculationCache, SpeculationCache]:
    """Writer and reader over one buffer."""
    buffer = buffer or bytearray(size_bytes(SLOTS, ENTRIES, K))
    writer = SpeculationCache(buffer, SLOTS, ENTRIES, K, create=True)
    return writer, SpeculationCache(buffer, SLOTS, ENTRIES, K, create=False, vocab_size=VOCAB)


def test_a_hit_shows_the_depth_that_is_ready() -> None:
    writer, reader = pair()
    writer.begin_round(1, [(BIG, 0, 7), (BIG, 0, 8), (BIG, K, 7)])
    assert reader.lookup(1, BIG, K, 7) == Hit(2, 0, [])
    for depth in range(1, K + 1):
        tokens = [10 * depth, 10 * depth + 1, 10 * depth + 2]
        writer.publish_depth(1, depth, tokens)
        hit = reader.lookup(1, BIG, K, 7)
        assert hit is not None
        assert hit.tokens == [10 * d + 2 for d in range(1, depth + 1)]
        assert hit.depth == depth == reader.depth_of(1, hit.entry)
    assert reader.lookup(0, BIG, K, 7) is None
    assert reader.lookup(1, BIG - 1, K, 7) is None
    assert reader.lookup(1, BIG, K - 1, 7) is None
    assert reader.lookup(1, BIG, K, 9) is None


def test_a_new_round_hides_the_old_one() -> None:
    writer, reader = pair()
    writer.begin_round(0, [(1, 0, t) for t in range(ENTRIES)])
    writer.publish_depth(0, 1, range(ENTRIES))
    writer.begin_round(0, [(2, 0, 0)])
    assert all(reader.lookup(0, 1, 0, t) is None for t in range(ENTRIES))
    assert reader.lookup(0, 2, 0, 0) == Hit(0, 0, [])
    writer.begin_round(0, [])
    assert reader.lookup(0, 2, 0, 0) is None


def test_a_cleared_slot_holds_nothing() -> None:
    writer, reader = pair()
    for slot in range(SLOTS):
        writer.begin_round(slot, [(6, 2, 9)])
        writer.publish_depth(slot, 1, [3])
    writer.clear(0)
    assert reader.lookup(0, 6, 2, 9) is None
    assert reader.lookup(1, 6, 2, 9) == Hit(0, 1, [3])


def test_same_outcome_of_another_prefix_is_told_apart() -> None:
    writer, reader = pair()
    writer.begin_round(0, [(11, 1, 4), (12, 1, 4)])
    writer.publish_depth(0, 1, [21, 22])
    assert reader.lookup(0, 11, 1, 4) == Hit(0, 1, [21])
    assert reader.lookup(0, 12, 1, 4) == Hit(1, 1, [22])


@pytest.mark.parametrize("bad", [-1, VOCAB, 2**31 - 1, -(2**31)])
def test_a_token_outside_the_vocabulary_is_a_miss(bad: int) -> None:
    writer, reader = pair()
    writer.begin_round(0, [(1, 0, 3)])
    writer.publish_depth(0, 1, [VOCAB - 1])
    writer.publish_depth(0, 2, [0])
    assert reader.lookup(0, 1, 0, 3) == Hit(0, 2, [VOCAB - 1, 0])
    writer.publish_depth(0, 2, [bad])
    assert reader.lookup(0, 1, 0, 3) is None


def test_any_bytes_are_survived() -> None:
    """Whatever a buffer holds, a lookup gives a miss or a chain a model can be fed."""
    rng = np.random.default_rng(4)
    buffer = bytearray(size_bytes(SLOTS, ENTRIES, K))
    _, reader = pair(buffer)
    label = bytes(buffer[:64])
    for _ in range(300):
        buffer[:] = label + rng.bytes(len(buffer) - 64)
        outcome, row_hash = reader._outcome[0][0], int(reader._hash[0][0])
        hit = reader.lookup(0, row_hash, int(outcome) >> 32, int(outcome) & 0xFFFFFFFF)
        if hit is not None:
            assert len(hit.tokens) == hit.depth <= K
            assert all(0 <= t < VOCAB for t in hit.tokens)


def test_a_writer_stuck_in_an_update_is_a_miss() -> None:
    writer, reader = pair()
    writer.begin_round(0, [(1, 0, 1)])
    writer._turn(0)
    assert reader.lookup(0, 1, 0, 1) is None
    writer._turn(0)
    assert reader.lookup(0, 1, 0, 1) == Hit(0, 0, [])


def test_wrong_buffers_and_shapes_are_refused() -> None:
    size = size_bytes(SLOTS, ENTRIES, K)
    with pytest.raises(ResourceError, match="bytes needed"):
        SpeculationCache(bytearray(size - 1), SLOTS, ENTRIES, K, create=True)
    with pytest.raises(ResourceError, match="does not hold"):
        SpeculationCache(bytearray(size), SLOTS, ENTRIES, K, create=False)
    buffer = bytearray(size)
    writer, _ = pair(buffer)
    with pytest.raises(ResourceError, match="does not hold"):
        SpeculationCache(buffer, SLOTS, ENTRIES - 1, K, create=False)
    with pytest.raises(ConfigError, match="entries"):
        SpeculationCache(buffer, SLOTS, 0, K, create=True)
    with pytest.raises(ConfigError, match="at most 6 branches"):
        writer.begin_round(0, [(0, 0, 0)] * (ENTRIES + 1))
    with pytest.raises(ConfigError, match="depth"):
        writer.publish_depth(0, K + 1, [])
    with pytest.raises(ConfigError, match="at most 0 branches"):
        writer.publish_depth(0, 1, [1])


def test_what_is_announced_is_known_by_its_prefix() -> None:
    writer, reader = pair()
    assert not reader.announced(0, BIG)
    writer.begin_round(0, [(BIG, 0, 7)])
    assert reader.announced(0, BIG)
    assert not reader.announced(0, BIG - 1)
    assert not reader.announced(1, BIG)
    writer.pass_over(0, 5)
    assert reader.announced(0, 5)
    assert not reader.announced(0, BIG)
    assert reader.lookup(0, BIG, 0, 7) is None
    writer._turn(0)  # within an update
    assert not reader.announced(0, 5)


key = st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(0, 2))
slot = st.integers(0, SLOTS - 1)


class Cache(RuleBasedStateMachine):
    """Against a plain dictionary, over any order of operations."""

    @initialize()
    def start(self) -> None:
        self.writer, self.reader = pair()
        self.branches: list[list[tuple[tuple[int, int, int], list[int]]]] = [[], []]
        self.depth = [0, 0]

    @rule(slot=slot, keys=st.lists(key, max_size=ENTRIES, unique=True))
    def begin_round(self, slot: int, keys: list[tuple[int, int, int]]) -> None:
        self.writer.begin_round(slot, keys)
        self.branches[slot] = [(k, []) for k in keys]
        self.depth[slot] = 0

    @rule(slot=slot, start=st.integers(0, 900))
    def publish_depth(self, slot: int, start: int) -> None:
        if self.depth[slot] == K:
            return
        self.depth[slot] += 1
        n = len(self.branches[slot])
        self.writer.publish_depth(slot, self.depth[slot], range(start, start + n))
        for i, (_, tokens) in enumerate(self.branches[slot]):
            tokens.append(start + i)

    @rule(slot=slot)
    def clear(self, slot: int) -> None:
        self.writer.clear(slot)
        self.branches[slot], self.depth[slot] = [], 0

    @rule(slot=slot, prefix=st.integers(0, 2))
    def pass_over(self, slot: int, prefix: int) -> None:
        self.writer.pass_over(slot, prefix)
        self.branches[slot], self.depth[slot] = [], 0
        assert self.reader.announced(slot, prefix)
        assert not self.reader.announced(slot, prefix + 1)

    @rule(slot=slot, key=key)
    def lookup(self, slot: int, key: tuple[int, int, int]) -> None:
        hit = self.reader.lookup(slot, *key)
        expected = next((tokens for k, tokens in self.branches[slot] if k == key), None)
        assert (None if hit is None else hit.tokens) == expected


TestCache = Cache.TestCase
TestCache.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)

READS = 20_000
LIMIT = 60.0


def _token(round_: int, branch: int, depth: int) -> int:
    return (round_ * 131 + branch * 17 + depth) % 30_000


def _write(path: Path, ready: Event, stop: Event) -> None:
    """Publish rounds as fast as possible; every token tells its round, branch and depth."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        cache = SpeculationCache(memory, SLOTS, ENTRIES, K, create=False)
        round_, deadline = 0, time.monotonic() + LIMIT
        while not stop.is_set() and time.monotonic() < deadline:
            round_ += 1
            cache.begin_round(0, [(round_, b % (K + 1), b) for b in range(ENTRIES)])
            for depth in range(1, K + 1):
                tokens = [_token(round_, b, depth) for b in range(ENTRIES)]
                cache.publish_depth(0, depth, tokens)
            ready.set()
        cache.close()


def test_two_processes_never_see_a_torn_row(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    path.write_bytes(bytes(size_bytes(SLOTS, ENTRIES, K)))
    context = multiprocessing.get_context("spawn")
    ready, stop = context.Event(), context.Event()
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        reader = SpeculationCache(memory, SLOTS, ENTRIES, K, create=True, vocab_size=30_000)
        process = context.Process(target=_write, args=(path, ready, stop), daemon=True)
        process.start()
        try:
            while not ready.wait(0.2):
                assert process.is_alive()
            reads, rounds, depths = 0, set(), set()
            deadline = time.monotonic() + LIMIT / 2
            # On a busy machine the writer may be descheduled for long; read until all was seen.
            while reads < READS or len(rounds) < 10 or depths != set(range(K + 1)):
                assert time.monotonic() < deadline
                reads += 1
                branch = reads % ENTRIES
                # Aim at what the writer works on now.
                round_ = int(reader._hash[0][branch])
                hit = reader.lookup(0, round_, branch % (K + 1), branch)
                if hit is not None:
                    rounds.add(round_)
                    depths.add(hit.depth)
                    assert hit.tokens == [_token(round_, branch, d + 1) for d in range(hit.depth)]
        finally:
            stop.set()
            process.join(30)
            reader.close()
        assert process.exitcode == 0
