"""A cache in parts behaves as one cache, whoever writes what, and whatever a writer does."""

from __future__ import annotations

import mmap
import multiprocessing
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from ssd_pipe.engine import speculation_cache
from ssd_pipe.engine.partition import Share, owner
from ssd_pipe.engine.partitioned_cache import PartitionedCache, make_part, size_bytes
from ssd_pipe.engine.speculation_cache import Hit, SpeculationCache
from ssd_pipe.errors import ResourceError

SLOTS, ENTRIES, K, VOCAB = 3, 7, 4, 1000
Key = tuple[int, int, int]


def made(workers: int) -> tuple[list[SpeculationCache], PartitionedCache]:
    """Every worker's part and the reader of all."""
    memory = bytearray(size_bytes(SLOTS, ENTRIES, K, workers))
    parts = [
        make_part(memory, SLOTS, ENTRIES, K, Share(worker, workers)) for worker in range(workers)
    ]
    return parts, PartitionedCache(memory, SLOTS, ENTRIES, K, workers, VOCAB)


def begin(parts: list[SpeculationCache], slot: int, keys: list[Key]) -> None:
    """As workers that agree on the ranking do."""
    for worker, part in enumerate(parts):
        part.begin_round(slot, Share(worker, len(parts)).of(slot, keys))


def test_branches_are_announced_once_every_worker_has_done_so() -> None:
    memory = bytearray(size_bytes(SLOTS, ENTRIES, K, 2))
    parts = [make_part(memory, SLOTS, ENTRIES, K, Share(worker, 2)) for worker in range(2)]
    cache = PartitionedCache(memory, SLOTS, ENTRIES, K, 2)
    parts[1].begin_round(0, [(9, 0, 4)])
    assert not cache.announced(0, 9)
    parts[0].pass_over(0, 9)
    assert cache.announced(0, 9)


def test_one_part_is_the_plain_cache() -> None:
    plain = speculation_cache.size_bytes(SLOTS, ENTRIES, K)
    assert size_bytes(SLOTS, ENTRIES, K, 1) == plain
    memory = bytearray(plain)
    reader = SpeculationCache(memory, SLOTS, ENTRIES, K, create=True)
    make_part(memory, SLOTS, ENTRIES, K, Share()).begin_round(1, [(5, 0, 3)])
    assert reader.lookup(1, 5, 0, 3) == Hit(0, 0, [])


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("slot", range(SLOTS))
def test_entries_are_numbered_by_likelihood_across_parts(workers: int, slot: int) -> None:
    parts, reader = made(workers)
    keys = [(9, i % (K + 1), 100 + i) for i in range(ENTRIES)]
    begin(parts, slot, keys)
    for entry, key in enumerate(keys):
        hit = reader.lookup(slot, *key)
        assert hit == Hit(entry, 0, [])
    late = owner(slot, 2, workers)
    for worker, part in enumerate(parts):
        own = Share(worker, workers).count(slot, ENTRIES)
        for depth in range(1, 3 if worker == late else 2):
            part.publish_depth(slot, depth, range(10 * depth, 10 * depth + own))
    for entry in range(ENTRIES):
        deep = owner(slot, entry, workers) == late
        place = entry // workers
        assert reader.tokens_of(slot, entry) == ([10 + place, 20 + place] if deep else [10 + place])
        assert reader.depth_of(slot, entry) == (2 if deep else 1)
        assert reader.goal_of(slot, entry) == K


def test_a_late_worker_costs_its_own_branches_only() -> None:
    parts, reader = made(2)
    begin(parts, 0, [(1, 0, t) for t in range(4)])
    parts[0].begin_round(0, [(2, 0, 0), (2, 0, 2)])  # the next round; worker 1 has not got there
    assert [reader.lookup(0, 2, 0, t) is not None for t in range(4)] == [True, False, True, False]
    assert reader.lookup(0, 1, 0, 1) is not None  # of the old prefix: nobody asks for it
    parts[1]._turn(0)  # descheduled inside an update
    assert reader.lookup(0, 2, 0, 0) == Hit(0, 0, [])
    assert reader.lookup(0, 2, 0, 1) is None


def test_an_outcome_that_two_workers_hold_is_a_hit_all_the_same() -> None:
    parts, reader = made(2)
    for worker, part in enumerate(parts):
        part.begin_round(0, [(1, 2, 30)])
        part.publish_depth(0, 1, [worker])
    assert reader.lookup(0, 1, 2, 30) == Hit(0, 1, [0])
    parts[0].clear(0)
    assert reader.lookup(0, 1, 2, 30) == Hit(1, 1, [1])
    assert reader.recovery_tokens(0, 1, 2) == [30]


def test_every_worker_hears_that_someone_waits() -> None:
    parts, reader = made(3)
    assert not reader.reader_waits
    reader.reader_waits = True
    assert [part.reader_waits for part in parts] == [True] * 3
    reader.reader_waits = False
    assert not any(part.reader_waits for part in parts)


def test_a_missing_part_and_a_small_buffer_are_refused() -> None:
    memory = bytearray(size_bytes(SLOTS, ENTRIES, K, 2))
    make_part(memory, SLOTS, ENTRIES, K, Share(0, 2))
    with pytest.raises(ResourceError, match="does not hold"):
        PartitionedCache(memory, SLOTS, ENTRIES, K, 2)
    with pytest.raises(ResourceError, match="bytes needed"):
        make_part(memory, SLOTS, ENTRIES, K, Share(2, 3))


key = st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(0, 2))
slot = st.integers(0, SLOTS - 1)
KEYS = [(h, k, t) for h in range(3) for k in range(2) for t in range(3)]


class Parts(RuleBasedStateMachine):
    """Against one dictionary of what each worker holds, over any order of operations."""

    @initialize(workers=st.integers(1, 4))
    def start(self, workers: int) -> None:
        self.workers = workers
        self.parts, self.reader = made(workers)
        self.held: list[list[dict[Key, list[int]]]] = [
            [{} for _ in range(SLOTS)] for _ in range(workers)
        ]

    @rule(slot=slot, keys=st.lists(key, max_size=ENTRIES, unique=True), data=st.data())
    def begin_round(self, slot: int, keys: list[Key], data: st.DataObject) -> None:
        """Some workers go on to this round; the others stay behind."""
        for worker in data.draw(st.sets(st.integers(0, self.workers - 1))):
            mine = Share(worker, self.workers).of(slot, keys)
            self.parts[worker].begin_round(slot, mine)
            self.held[worker][slot] = {k: [] for k in mine}

    @rule(slot=slot, start=st.integers(0, 900), data=st.data())
    def publish(self, slot: int, start: int, data: st.DataObject) -> None:
        worker = data.draw(st.integers(0, self.workers - 1))
        chains = self.held[worker][slot]
        depth = max(map(len, chains.values()), default=0) + 1
        if depth > K or not chains:
            return
        living = data.draw(st.integers(1, sum(len(c) == depth - 1 for c in chains.values())))
        self.parts[worker].publish_depth(slot, depth, range(start, start + living))
        for i, chain in enumerate(list(chains.values())[:living]):
            chain.append(start + i)

    @rule(slot=slot, data=st.data())
    def clear(self, slot: int, data: st.DataObject) -> None:
        worker = data.draw(st.integers(0, self.workers - 1))
        self.parts[worker].clear(slot)
        self.held[worker][slot] = {}

    @rule(slot=slot)
    def lookup_all(self, slot: int) -> None:
        for wanted in KEYS:
            hit = self.reader.lookup(slot, *wanted)
            holders = [w for w in range(self.workers) if wanted in self.held[w][slot]]
            if not holders:
                assert hit is None
                continue
            assert hit is not None
            assert owner(slot, hit.entry, self.workers) == holders[0]
            assert hit.tokens == self.held[holders[0]][slot][wanted]
            assert self.reader.tokens_of(slot, hit.entry) == hit.tokens


TestParts = Parts.TestCase
TestParts.settings = settings(max_examples=50, stateful_step_count=20, deadline=None)

READS = 8_000
LIMIT = 60.0


def _token(round_: int, entry: int, depth: int) -> int:
    return (round_ * 131 + entry * 17 + depth) % 30_000


def _write(path: Path, worker: int, ready: Event, stop: Event) -> None:
    """Publish rounds as fast as possible; every token tells its round, entry and depth."""
    share = Share(worker, 2)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        part = make_part(memory, SLOTS, ENTRIES, K, share)
        entries = share.of(1, range(ENTRIES))
        round_, deadline = 0, time.monotonic() + LIMIT
        while not stop.is_set() and time.monotonic() < deadline:
            round_ += 1
            part.begin_round(1, [(round_, e % (K + 1), e) for e in entries])
            for depth in range(1, K + 1):
                part.publish_depth(1, depth, [_token(round_, e, depth) for e in entries])
            ready.set()
        part.close()


def test_two_writers_and_a_reader_never_see_a_torn_row(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    path.write_bytes(bytes(size_bytes(SLOTS, ENTRIES, K, 2)))
    context = multiprocessing.get_context("spawn")
    ready, stop = [context.Event(), context.Event()], context.Event()
    writers = [
        context.Process(target=_write, args=(path, worker, ready[worker], stop), daemon=True)
        for worker in range(2)
    ]
    for writer in writers:
        writer.start()
    try:
        for worker, event in enumerate(ready):
            while not event.wait(0.2):
                assert writers[worker].is_alive()
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            reader = PartitionedCache(memory, SLOTS, ENTRIES, K, 2, 30_000)
            reads, seen = 0, set()
            deadline = time.monotonic() + LIMIT / 2
            # On a busy machine a writer may be descheduled for long; read until both were seen.
            while reads < READS or len(seen) < 2:
                assert time.monotonic() < deadline
                reads += 1
                entry = reads % ENTRIES
                # Aim at what its writer works on now.
                part, place = reader._at(1, entry)
                round_ = int(part._hash[1][place])
                hit = reader.lookup(1, round_, entry % (K + 1), entry)
                if hit is not None:
                    assert hit.entry == entry
                    if hit.depth:
                        seen.add(owner(1, entry, 2))
                    assert hit.tokens == [_token(round_, entry, d + 1) for d in range(hit.depth)]
            del part
            reader.close()
    finally:
        stop.set()
        for writer in writers:
            writer.join(30)
    assert [writer.exitcode for writer in writers] == [0, 0]
