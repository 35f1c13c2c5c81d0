from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd_pipe.engine.ngram import NgramProposer
from ssd_pipe.errors import ConfigError


def naive(tokens: list[int], longest: int, shortest: int, k: int) -> list[int]:
    for n in range(longest, shortest - 1, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if len(tokens) > n and tokens[start : start + n] == tokens[-n:]:
                return tokens[start + n : start + n + k]
    return []


@given(
    pieces=st.lists(st.lists(st.integers(0, 3), max_size=12), max_size=8),
    shortest=st.integers(1, 3),
    extra=st.integers(0, 3),
    k=st.integers(1, 6),
)
def test_same_as_naive_search_at_every_step(
    pieces: list[list[int]], shortest: int, extra: int, k: int
) -> None:
    longest = shortest + extra
    proposer = NgramProposer(longest, shortest)
    tokens: list[int] = []
    for piece in pieces:
        proposer.extend(piece)
        tokens += piece
        assert list(proposer.propose(k)) == naive(tokens, longest, shortest, k)
        assert len(proposer) == len(tokens)


def test_indexing_in_one_go_equals_step_by_step() -> None:
    tokens = [1, 2, 3, 1, 2, 4, 1, 2, 3, 1]
    steps = NgramProposer(3, 1)
    for token in tokens:
        steps.extend([token])
        steps.propose(1)
    assert list(NgramProposer(3, 1, tokens).propose(4)) == list(steps.propose(4)) == [2, 4, 1, 2]


def test_longest_suffix_wins_over_a_more_recent_short_one() -> None:
    tokens = [5, 6, 7, 10, 8, 7, 11, 5, 6, 7]
    assert list(NgramProposer(3, 1, tokens).propose(1)) == [10]
    assert list(NgramProposer(1, 1, tokens).propose(1)) == [11]


def test_nothing_to_propose() -> None:
    assert list(NgramProposer(4, 2).propose(5)) == []
    assert list(NgramProposer(4, 2, [1, 2, 3, 4, 5]).propose(5)) == []


def test_bad_lengths_are_refused() -> None:
    for longest, shortest in ((2, 3), (2, 0)):
        with pytest.raises(ConfigError, match=r"speculation\.ngram_min"):
            NgramProposer(longest, shortest)
