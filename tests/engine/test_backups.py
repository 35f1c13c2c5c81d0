"""Which rows without a chain get which backup, and what is counted."""

from __future__ import annotations

import pytest

from ipc.messages.draft import DraftLease
from ipc.messages.requests import AddRequest
from ipc.messages.sampling import NoiseKey
from ssd_pipe.config import Backup, SpeculationSection
from ssd_pipe.engine.backups import PROBE_EVERY, Backups
from ssd_pipe.engine.blocks import BlockTable
from ssd_pipe.engine.counters import Counters
from ssd_pipe.engine.effort import Effort
from ssd_pipe.engine.request import Request
from ssd_pipe.engine.round_pace import RoundPace

K = 4
FULL = Effort(K, 10)
REPEATING = [1, 2, 3, 1, 2, 3, 1, 2]
FRESH = [1, 2, 3, 4, 5]


def request_of(slot: int, tokens: list[int], chain: tuple[int, ...] = ()) -> Request:
    message = AddRequest(slot, tokens, 50, NoiseKey(), [], 0)
    request = Request.from_message(message, 1, BlockTable())
    request.slot, request.chain = slot, list(chain)
    return request


class Scene:
    def __init__(self, backup: Backup) -> None:
        spec = SpeculationSection(k=K, backup=backup)
        self.counters = Counters.of(K)
        self.pace = RoundPace("ssd", spec)
        self.backups = Backups(spec, self.pace, self.counters)

    def choose(
        self, *requests: Request, effort: Effort = FULL, limit: int = K, told: bool = True
    ) -> dict[int, int]:
        slots = [request.slot for request in requests]
        limits = dict.fromkeys(slots, limit)
        return self.backups.choose(requests, limits, effort, slots if told else ())

    @property
    def counted(self) -> tuple[int, int, int]:
        counters = self.counters
        return counters.backup_jit, counters.backup_ngram, counters.backup_none


@pytest.mark.parametrize(
    ("backup", "drafted", "looked_up", "counted"),
    [
        ("jit", {1: K, 2: K}, [], (2, 0, 0)),
        ("auto", {}, [3, 1, 2], (0, 1, 1)),
        ("ngram", {}, [3, 1, 2], (0, 1, 1)),
        ("none", {}, [], (0, 0, 2)),
    ],
)
def test_beside_a_hit(
    backup: Backup,
    drafted: dict[int, int],
    looked_up: list[int],
    counted: tuple[int, int, int],
) -> None:
    """Only "jit" makes a row that hit wait for those that missed."""
    scene = Scene(backup)
    hit, known, new = request_of(0, FRESH, (7,)), request_of(1, REPEATING), request_of(2, FRESH)
    assert scene.choose(hit, known, new) == drafted
    assert (hit.chain, known.chain, new.chain) == ([7], looked_up, [])
    assert scene.counted == counted


def test_alone_the_target_waits_while_nothing_is_known_of_the_time() -> None:
    scene = Scene("auto")
    assert scene.choose(request_of(0, REPEATING), limit=3) == {0: 3}
    assert scene.counted == (1, 0, 0)


def test_slow_drafting_is_tried_now_and_then() -> None:
    scene = Scene("auto")
    scene.pace.times.observe("backup_step", 1.0)
    scene.pace.times.observe_verify(1, 1e-3)
    lengths = [scene.choose(request_of(0, FRESH)) for _ in range(3 * PROBE_EVERY)]
    assert [found for found in lengths if found] == [{0: 1}] * 3
    assert lengths[PROBE_EVERY - 1] == {0: 1}


def test_fast_drafting_is_used_in_full() -> None:
    scene = Scene("auto")
    scene.pace.times.observe("backup_step", 1e-6)
    scene.pace.times.observe_verify(K + 1, 1.0)
    assert scene.choose(request_of(0, REPEATING)) == {0: K}


@pytest.mark.parametrize("backup", ["auto", "jit", "ngram", "none"])
def test_in_turn_every_chain_is_drafted(backup: Backup) -> None:
    scene = Scene(backup)
    rows = request_of(0, FRESH, (7,)), request_of(1, REPEATING)
    assert scene.choose(*rows, effort=Effort(K, 0)) == {1: K}


def test_who_the_draft_is_not_told_of_gets_no_draft() -> None:
    scene = Scene("jit")
    request = request_of(0, REPEATING)
    assert scene.choose(request, told=False) == {}
    assert request.chain == []
    assert scene.counted == (0, 0, 1)


def test_a_row_at_its_limit_needs_none() -> None:
    scene = Scene("jit")
    assert scene.choose(request_of(0, FRESH), limit=0) == {}
    assert scene.counted == (0, 0, 0)


def test_misses_are_due_until_they_are_backed_up_or_over() -> None:
    scene = Scene("none")
    request = request_of(0, FRESH)
    for end in (scene.choose, scene.backups.forget, lambda _: scene.backups.cancel()):
        assert not scene.backups.due
        scene.backups.miss(request)
        assert scene.backups.due
        end(request)
    assert not scene.backups.due


@pytest.mark.parametrize(
    ("lease", "counted"),
    [
        (DraftLease(1, 5, 3), (0, 1, 1)),  # a row that hit does not wait
        (DraftLease(1, 5, 3, True), (2, 0, 0)),
        (DraftLease(1, 5, 0), (0, 1, 1)),
    ],
)
def test_leased_rounds_count_alike(lease: DraftLease, counted: tuple[int, int, int]) -> None:
    scene = Scene("auto")
    requests = [request_of(slot, FRESH) for slot in range(3)]
    for request in requests[1:]:
        scene.backups.miss(request)
    scene.backups.follow(requests, [[7], [8, 9], []], lease)
    assert scene.counted == counted
    assert not scene.backups.due
