"""A recorded course of acceptance, for chains and batches other than the recorded ones."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd_pipe.engine.acceptance_trace import (
    MAX_COURSES,
    AcceptanceTrace,
    RecordedRound,
    TraceReplay,
    read_trace,
)


def recorded(k: int = 5, count: int = 4000, a: float = 0.7, seed: int = 1) -> AcceptanceTrace:
    """Rounds of a pair that accepts each token with chance ``a``; a refusal is a hit by .5, a whole
    chain by .9. Some chains are shorter than k."""
    rng = random.Random(seed)
    rounds = []
    for _ in range(count):
        chain, accepted = rng.choice([k, k, k, max(1, k - 2)]), 0
        while accepted < chain and rng.random() < a:
            accepted += 1
        hit = rng.random() < (0.9 if accepted == chain else 0.5)
        rounds.append(RecordedRound(accepted, hit, chain))
    return AcceptanceTrace(k=k, pair="made up", temperature=0.0, rounds=rounds)


rounds_of = st.lists(
    st.integers(1, 5).flatmap(
        lambda chain: st.builds(RecordedRound, st.integers(0, chain), st.booleans(), st.just(chain))
    ),
    min_size=1,
    max_size=12,
)


@given(rounds=rounds_of, chains=st.lists(st.integers(0, 9), max_size=40))
def test_each_round_is_as_recorded_where_the_chain_allows(
    rounds: list[RecordedRound], chains: list[int]
) -> None:
    replay = TraceReplay(AcceptanceTrace(5, "p", 0.0, rounds))
    at = 0
    for chain in chains:
        accepted, hit = replay.draw(9, chain)
        if not chain:
            assert accepted == 0
            continue
        was = rounds[at % len(rounds)]
        at += 1
        if was.accepted < min(was.chain, chain):
            assert (accepted, hit) == (was.accepted, was.hit)
        elif chain <= was.accepted:
            assert accepted == chain
            assert chain < was.chain or hit == was.hit
        else:
            assert was.chain <= accepted <= chain


@pytest.mark.parametrize("k", [1, 3, 5, 8])
def test_another_chain_length_meets_the_same_acceptance(k: int) -> None:
    replay = TraceReplay(recorded())
    drawn = [replay.draw(0, k) for _ in range(4000)]
    mean = sum(accepted for accepted, _ in drawn) / len(drawn)
    assert mean == pytest.approx(sum(0.7**j for j in range(1, k + 1)), abs=0.12)
    for whole, rate in ((True, 0.9), (False, 0.5)):
        hits = [hit for accepted, hit in drawn if (accepted == k) == whole]
        assert sum(hits) / len(hits) == pytest.approx(rate, abs=0.06)


def test_rates_are_those_of_the_rounds() -> None:
    trace = AcceptanceTrace(
        k=4,
        pair="p",
        temperature=0.0,
        rounds=[RecordedRound(2, True, 3), RecordedRound(0, False, 3), RecordedRound(2, True, 2)],
    )
    assert trace.acceptance() == [pytest.approx(2 / 3), 1.0, 0.0, 0.0]
    assert trace.hit_rate() == pytest.approx(2 / 3)
    assert trace.hit_rate(True) == 1.0
    assert trace.hit_rate(False) == 0.5
    only = msgspec.structs.replace(trace, rounds=trace.rounds[:1])
    assert only.hit_rate(True) == only.hit_rate() == 1.0


def test_requests_have_courses_of_their_own_that_batch_mates_do_not_change() -> None:
    alone = TraceReplay(recorded())
    expected = [alone.draw(0, 7) for _ in range(50)]
    together = TraceReplay(recorded())
    drawn: dict[int, list[tuple[int, bool]]] = {rid: [] for rid in range(4)}
    for _ in range(50):
        for rid, seen in drawn.items():
            seen.append(together.draw(rid, 7))
    assert drawn[0] == expected
    assert len({tuple(seen) for seen in drawn.values()}) == 4


def test_the_place_of_a_request_in_use_is_never_forgotten() -> None:
    trace = AcceptanceTrace(3, "p", 0.0, [RecordedRound(i % 4, True, 3) for i in range(8)])
    replay = TraceReplay(trace)
    first = [replay.draw(0, 3)[0]]
    for rid in range(1, MAX_COURSES + 50):
        replay.draw(rid, 3)
        if rid % 500 == 0:
            first.append(replay.draw(0, 3)[0])
    assert first == [0, 1, 2]


def test_a_file_is_read_and_rounds_without_a_chain_are_left_out(tmp_path: Path) -> None:
    trace = recorded(count=20)
    path = tmp_path / "trace.json"
    idle = [*trace.rounds, RecordedRound(0, True, 0)]
    content = msgspec.to_builtins(msgspec.structs.replace(trace, rounds=idle))
    path.write_bytes(msgspec.json.encode(content | {"date": "2026-11-29"}))
    assert read_trace(path) == trace
