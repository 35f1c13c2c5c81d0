"""The scheduler's side of a lease: what ends it, and what a dead draft is spoken for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from ipc import round_records as rr
from ipc.messages.target import StepResult
from procs import lease_follower
from procs.draft_port import DRAFT
from procs.lease_follower import LeaseFollower, can_lease
from ssd_pipe.engine.leases import Leased, Leases
from ssd_pipe.engine.round_times import RoundTimes
from tests.engine.test_leases import Gpu, Side, World, prefilled, request_of


@dataclass
class Target:
    """A target whose GPU does a round whenever it is looked at, until it is recalled."""

    gpu: Gpu
    leased: Leased
    records: rr.RoundRecords
    flags: int = 0
    before: Callable[[int], None] = lambda number: None
    done: int = 0
    going: bool = True

    def lease_end(self, step: int) -> StepResult | None:
        recalled = self.records.recalled == self.leased.terms.first
        if not self.going or recalled or self.done == self.leased.terms.rounds:
            return StepResult(step, [], 0, 0, 0, rounds=self.done)
        self.before(self.gpu.number)
        self.going = self.gpu.launch() and not self.flags
        last = self.records.records[(self.gpu.number - 1) % rr.ROUNDS, 0]
        last[rr.FLAGS] |= self.flags
        self.done += 1
        return None


@dataclass
class Peers:
    """What the scheduler hears of its peers and its frontend."""

    mail: bool = False
    gone: str = ""
    stopping: bool = False
    told: list[int] = field(default_factory=list)

    @staticmethod
    def now() -> float:
        return 0.0

    def goes_on(self, started: float) -> bool:
        return not self.stopping

    def absence(self, name: str) -> str:
        assert name == DRAFT
        return self.gone


class Scene:
    def __init__(self, peers: Peers, **target: Any) -> None:
        self.side = Side(World(5), True, 60)
        self.request = request_of(0, [1, 2, 3], 40)
        prefilled(self.side, self.request)
        leases = cast(Leases, self.side.leases)
        step = self.side.scheduler.schedule()
        assert step is not None
        self.times = RoundTimes()
        follower = LeaseFollower(
            leases,
            self.side.records,
            cast(Any, None),
            lambda: peers.mail,
            cast(Any, peers),
            self.times,
            lambda step, result, verified, emissions, *rest: peers.told.append(len(emissions)),
        )
        leased = follower.grant(step)
        assert leased is not None
        self.leased = leased
        self.target = Target(
            Gpu(self.side.world, self.side.records, leased), leased, self.side.records, **target
        )
        follower._target = cast(Any, self.target)
        self.read, self.late = follower.follow(leased)


@pytest.fixture(autouse=True)
def _attentive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks after its peers each time, so that a test's few rounds are enough."""
    monkeypatch.setattr(lease_follower, "ATTEND_EVERY", 1)


def test_a_lease_is_followed_to_its_end() -> None:
    peers = Peers()
    scene = Scene(peers)
    assert not scene.late
    assert len(scene.request.tokens) == scene.request.limit
    assert scene.read == scene.leased.number - 1 == scene.side.records.progress(rr.FOLLOWED)
    assert sum(peers.told) == len(peers.told) == scene.times.steps == scene.target.done


@pytest.mark.parametrize("peers", [Peers(mail=True), Peers(gone="draft: died")])
def test_a_message_or_a_dead_draft_ends_it_early(peers: Peers) -> None:
    scene = Scene(peers)
    assert scene.side.records.recalled == scene.leased.terms.first
    assert scene.target.done < 3
    assert scene.request.slot >= 0
    spoken = scene.side.records.mail[scene.request.slot]
    assert bool(spoken[rr.SKIP]) is bool(peers.gone)
    if peers.gone:
        assert spoken[rr.SKIP] == spoken[rr.ANSWER] + 1
        assert not spoken[rr.LENGTH]


def test_a_late_draft_is_told_of() -> None:
    assert Scene(Peers(), flags=rr.LATE).late


def test_a_stopping_process_leaves_at_once() -> None:
    scene = Scene(Peers(stopping=True))
    assert scene.target.done <= 1


def test_both_sides_must_be_able() -> None:
    able, unable = {"leased_rounds": 1}, {"leased_rounds": 0}
    assert can_lease({"target-0": able, "draft": able, "frontend": {}})
    assert not can_lease({"target-0": able, "draft": unable})
    assert not can_lease({"target-0": able})
    assert not can_lease({"target-0": able, "draft": {}})
    assert not can_lease({"target-0": able, "draft-0": able, "draft-1": able})
