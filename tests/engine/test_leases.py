"""Leased rounds commit what rounds through the scheduler do: same tokens, blocks, counters."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipc import round_records as rr
from ipc.messages.draft import DraftLease
from ipc.messages.requests import AddRequest
from ipc.messages.sampling import NoiseKey, Processors
from ipc.messages.target import RowOutcome
from ipc.round_records import RoundRecords
from ssd_pipe.config import SpeculationSection
from ssd_pipe.engine.blocks import BlockManager, BlockTable
from ssd_pipe.engine.hashing import extend_all
from ssd_pipe.engine.leases import MAX_ROUNDS, Leased, Leases, leasable
from ssd_pipe.engine.partition import Share
from ssd_pipe.engine.partitioned_cache import PartitionedCache, make_part, size_bytes
from ssd_pipe.engine.request import Request
from ssd_pipe.engine.rounds import RoundPlanner
from ssd_pipe.engine.scheduler import Scheduler
from ssd_pipe.engine.step import Emission

K, BLOCK, SLOTS, MAX_LEN, VOCAB = 3, 4, 3, 60, 9
SPEC = SpeculationSection(k=K, backup="none", adaptive=False)


def request_of(rid: int, tokens: list[int], max_tokens: int, **more: Any) -> Request:
    key = more.pop("key", NoiseKey())
    message = AddRequest(rid, tokens, max_tokens, key, more.pop("stops", []), 0, **more)
    return Request.from_message(message, 1, BlockTable())


@dataclass
class World:
    """Two models that know what comes at every place; chains and hits depend on the place alone."""

    seed: int
    outputs: dict[int, list[int]] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)

    def target(self, rid: int, position: int) -> int:
        return random.Random(f"{self.seed} {rid} {position}").randrange(VOCAB)

    def chain(self, rid: int, length: int) -> list[int]:
        """What the cache holds after so many tokens; empty is a miss."""
        rng = random.Random(f"{self.seed} chain {rid} {length}")
        right = [self.target(rid, length + j) for j in range(rng.randint(0, K))]
        return [t if rng.random() < 0.7 else rng.randrange(VOCAB) for t in right]

    def outcome(self, rid: int, length: int, chain: list[int]) -> RowOutcome:
        k = 0
        while k < len(chain) and chain[k] == self.target(rid, length + k):
            k += 1
        return RowOutcome(k, self.target(rid, length + k))

    def emit(self, emissions: list[Emission]) -> None:
        for emission in emissions:
            rid = emission.request.rid
            self.outputs.setdefault(rid, []).extend(emission.tokens)
            if emission.finish:
                self.finish[rid] = emission.finish


class Gpu:
    """Writes the records of a lease as the kernels do."""

    def __init__(self, world: World, records: RoundRecords, leased: Leased) -> None:
        self.world, self.records, self.number = world, records, leased.terms.first
        self.rows = [
            [r.rid, len(r.tokens), list(r.chain), terms.left, terms.stop_ids, False]
            for r, terms in zip(leased.requests, leased.terms.rows, strict=True)
        ]

    def launch(self) -> bool:
        """One round; whether any row is left."""
        for i, row in enumerate(self.rows):
            rid, length, chain, left, stops, over = row
            line = self.records.records[self.number % rr.ROUNDS, i]
            line[rr.FLAGS] = rr.IDLE
            if not over:
                self._settle(row, line, rid, length, chain, left, stops)
            line[rr.NUMBER] = self.number
        self.number += 1
        return not all(row[5] for row in self.rows)

    def _settle(
        self,
        row: list[Any],
        line: np.ndarray,
        rid: int,
        length: int,
        chain: list[int],
        left: int,
        stops: list[int],
    ) -> None:
        outcome = self.world.outcome(rid, length, chain)
        said = [*chain[: outcome.accepted], outcome.token]
        over = len(said) >= left or any(t in stops for t in said[:left])
        following = self.world.chain(rid, length + len(said))
        room = max(0, min(K, left - len(said) - 1))
        head = rr.RECORD_HEAD
        line[rr.ACCEPTED], line[rr.TOKEN] = outcome.accepted, outcome.token
        line[rr.CHAIN], line[rr.READY], line[rr.ROOM] = len(chain), len(following), room
        line[rr.ENTRY] = 0 if following else -1
        line[rr.FLAGS] = rr.FINISHED if over else 0
        line[head : head + len(chain)] = chain
        line[head + K : head + K + len(following)] = following
        row[1:4] = length + len(said), following[:room], left - len(said)
        row[5] = over


class Side:
    """A scheduler with everything around it, leasing or not."""

    def __init__(self, world: World, leasing: bool, blocks: int) -> None:
        self.world = world
        self.scheduler = Scheduler(BlockManager(blocks, BLOCK), SLOTS, MAX_LEN, 24, K, 50)
        shape = (SLOTS, 4, K)
        memory = bytearray(size_bytes(*shape, 1))
        self.cache = make_part(memory, *shape, Share(0, 1))
        self.planner = RoundPlanner("ssd", SPEC, PartitionedCache(memory, *shape, 1))
        self.leases = Leases(self.scheduler, self.planner, SPEC) if leasing else None
        words = np.zeros(RoundRecords.size_bytes(SLOTS, K), np.uint8)
        self.records = RoundRecords(words, SLOTS, K)
        self.requests: list[Request] = []
        self.leased = 0

    def add(self, request: Request) -> None:
        self.requests.append(request)
        self.scheduler.add(request)

    def run(self, rng: random.Random) -> None:
        while self.scheduler.has_work:
            step = self.scheduler.schedule()
            assert step is not None
            leased = self.leases.grant(step) if self.leases else None
            room = {r.request.slot: self.scheduler.chain_room(r.request) for r in step.decoding}
            self.planner.plan_draft(step, self.planner.prepare(step, room), {})
            if leased is not None and self.leases is not None:
                self.follow(self.leases, leased, rng)
                continue
            outcomes = [
                self.world.outcome(
                    r.request.rid, len(r.request.tokens), r.request.chain if r.decoding else []
                )
                for r in step.sampled
            ]
            chains = {r.request.slot: len(r.request.chain) for r in step.decoding}
            slots = [r.request.slot for r in step.sampled]
            for row, outcome in zip(step.sampled, outcomes, strict=True):
                self.publish(row.request, outcome, row.request.chain if row.decoding else [])
            emissions = self.scheduler.apply(step, outcomes)
            for slot, emission in zip(slots, emissions, strict=True):
                self.planner.settle(emission, chains.get(slot, 0))
                self.planner.conclude(emission)
            self.world.emit(emissions)

    def publish(self, request: Request, outcome: RowOutcome, chain: list[int]) -> None:
        """What the draft has of the coming outcome."""
        length = len(request.tokens) + outcome.accepted + 1
        following = self.world.chain(request.rid, length)
        key = (request.prefix_hash, outcome.accepted, outcome.token)
        self.cache.begin_round(request.slot, [key])
        for depth, token in enumerate(following, 1):
            self.cache.publish_depth(request.slot, depth, [token])

    def follow(self, leases: Leases, leased: Leased, rng: random.Random) -> None:
        gpu = Gpu(self.world, self.records, leased)
        free = self.scheduler.blocks.num_free
        for _ in range(leased.terms.rounds):
            number = leased.number
            going = gpu.launch()
            found = self.records.round(number, len(leased.requests))
            assert found is not None
            lengths = [len(r.tokens) for r in leased.requests]
            _, emissions = leases.follow(leased, found)
            self.leased += 1
            self.world.emit(emissions)
            for request, length in zip(leased.requests, lengths, strict=True):
                if request.slot >= 0:
                    assert request.computed == len(request.tokens) - 1 >= length
                    assert request.draft_length == len(request.tokens)
                    covered = len(request.table.blocks) * BLOCK
                    assert request.computed <= covered
            assert self.scheduler.blocks.num_free >= free  # none is taken within a lease
            if not going or rng.random() < 0.15:
                break

    @property
    def counters(self) -> dict[str, Any]:
        """Of rounds; how rows share steps may differ."""
        counters = msgspec.structs.asdict(self.planner.counters)
        return {name: n for name, n in counters.items() if not name.startswith("steps_")}


@given(seed=st.integers(0, 2**32), count=st.integers(1, 5), blocks=st.integers(40, 80))
@settings(max_examples=80, deadline=None)
def test_following_equals_scheduling(seed: int, count: int, blocks: int) -> None:
    sides = []
    for leasing in (False, True):
        rng = random.Random(seed)
        side = Side(World(seed), leasing, blocks)
        for rid in range(count):
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
            stops = [rng.randrange(VOCAB)] if rng.random() < 0.3 else []
            side.add(request_of(rid, prompt, rng.randint(1, 30), stops=stops))
        side.run(rng)
        sides.append(side)
    plain, leased = sides
    assert leased.world.outputs == plain.world.outputs
    assert leased.world.finish == plain.world.finish
    for a, b in zip(plain.requests, leased.requests, strict=True):
        assert a.tokens == b.tokens
        assert a.prefix_hash == b.prefix_hash
        assert (a.rounds, a.drafted, a.accepted) == (b.rounds, b.drafted, b.accepted)
        assert (a.hits, a.misses) == (b.hits, b.misses)
        assert extend_all(1, b.tokens) == b.prefix_hash
    assert leased.counters == plain.counters
    assert leased.scheduler.blocks.num_free == plain.scheduler.blocks.num_free == blocks
    assert sorted(leased.scheduler.take_dropped()) is not None


def test_leases_run() -> None:
    side = Side(World(1), True, 60)
    side.add(request_of(0, [1, 2, 3], 40))
    side.run(random.Random(1))
    assert side.leased >= 5


def prefilled(side: Side, *requests: Request) -> None:
    """Requests that have their first token."""
    for request in requests:
        side.add(request)
    while not all(r.prefilled for r in requests):
        step = side.scheduler.schedule()
        assert step is not None
        side.scheduler.apply(step, [side.world.outcome(r.request.rid, 0, []) for r in step.sampled])


def test_a_lease_has_blocks_for_all_its_rounds_and_leaves_half() -> None:
    side = Side(World(2), True, 40)
    request = request_of(0, [1, 2, 3], 50)
    prefilled(side, request)
    step = side.scheduler.schedule()
    assert step is not None
    assert side.leases is not None
    free = side.scheduler.blocks.num_free
    leased = side.leases.grant(step)
    assert leased is not None
    assert 2 <= leased.terms.rounds <= MAX_ROUNDS
    reach = min(request.computed + leased.terms.rounds * (K + 1), request.limit)
    assert len(request.table.blocks) * BLOCK >= reach
    assert side.scheduler.blocks.num_free >= free // 2
    assert leased.terms.rows[0].left == request.room
    again = side.leases.grant(step)
    assert again is not None
    assert again.terms.first == leased.terms.first + leased.terms.rounds


def test_no_lease_beside_a_prompt_or_for_the_last_token_or_without_blocks() -> None:
    side = Side(World(3), True, 60)
    running, last = request_of(0, [1], 40), request_of(1, [2], 2)
    prefilled(side, running)
    assert side.leases is not None
    side.add(request_of(2, list(range(9)) * 3, 9))
    step = side.scheduler.schedule()
    assert step is not None
    assert len(step.rows) == 2
    assert side.leases.grant(step) is None
    alone = Side(World(3), True, 60)
    prefilled(alone, last)
    step = alone.scheduler.schedule()
    assert step is not None
    assert alone.leases is not None
    assert alone.leases.grant(step) is None
    tight = Side(World(3), True, 3)
    prefilled(tight, request_of(3, [1, 2], 9))
    step = tight.scheduler.schedule()
    assert step is not None
    assert tight.leases is not None
    assert tight.leases.grant(step) is None


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, True),
        ({"key": NoiseKey(1, 0.7)}, True),
        ({"key": NoiseKey(1, 0.0, 0.5)}, True),
        ({"key": NoiseKey(1, 0.7, 0.5)}, False),
        ({"key": NoiseKey(processors=Processors(repetition_penalty=2.0))}, False),
        ({"logprobs": 0}, False),
        ({"stops": list(range(rr.MAX_STOPS))}, True),
        ({"stops": list(range(rr.MAX_STOPS + 1))}, False),
    ],
)
def test_what_a_gpu_can_judge_alone(more: dict[str, Any], expected: bool) -> None:
    assert leasable(request_of(0, [1], 5, **more)) is expected


def test_policies() -> None:
    planner = RoundPlanner("ssd", SpeculationSection(k=K), None)
    assert planner.lease_policy(1) == (rr.WAIT_BRANCHES | 1, K, False)
    planner.pace.times.observe("step", 1e-6)
    planner.pace.times.observe_verify(K + 1, 1.0)
    assert planner.lease_policy(1).waits == rr.WAIT_BRANCHES | 0b111
    assert planner.lease_policy(2).waits == rr.WAIT_BRANCHES | 1
    for backup, expected in (("none", -1), ("ngram", 0), ("jit", K)):
        policy = RoundPlanner("ssd", SpeculationSection(k=K, backup=backup), None).lease_policy(1)
        assert (policy.backup, policy.always) == (expected, backup == "jit")
    assert DraftLease(1, 2, 3).drafts(2, 2)
    assert not DraftLease(1, 2, 3).drafts(1, 2)
    assert DraftLease(1, 2, 3, True).drafts(1, 2)
    assert not DraftLease(1, 2, 0, True).drafts(2, 2)
