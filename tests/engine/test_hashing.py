from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipc.messages.sampling import NoiseKey
from ssd_pipe.engine.hashing import (
    DIGEST_BYTES,
    ROOT_DIGEST,
    block_digest,
    extend_all,
    initial,
)

tokens = st.lists(st.integers(0, 200_000), max_size=40)
hashes = st.integers(0, 2**64 - 1)
GAMMA = 0x9E3779B97F4A7C15


def splitmix(state: int) -> int:
    """The published generator, written from its definition: one output for a given state."""
    z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def test_one_token_is_a_step_of_splitmix64() -> None:
    # First outputs of splitmix64 seeded with 0, as published with the xoshiro generators.
    assert extend_all(0, [0]) == 0xE220A8397B1DCDAF
    assert splitmix(2 * GAMMA % 2**64) == 0x6E789E6AA1B965F4 == extend_all(0, [1])


@given(hashes, tokens)
def test_a_chain_is_one_step_a_token(h: int, seq: list[int]) -> None:
    one_by_one = h
    for token in seq:
        one_by_one = splitmix((one_by_one + (token + 1) * GAMMA) % 2**64)
    assert extend_all(h, seq) == one_by_one
    assert 0 <= one_by_one < 2**64


@given(hashes, tokens, tokens)
def test_chain_can_be_split_anywhere(h: int, a: list[int], b: list[int]) -> None:
    assert extend_all(extend_all(h, a), b) == extend_all(h, a + b)


@given(hashes, st.integers(0, 200_000), st.integers(0, 200_000))
def test_siblings_and_orders_differ(h: int, a: int, b: int) -> None:
    assert (extend_all(h, [a]) == extend_all(h, [b])) == (a == b)
    assert (extend_all(h, [a, b]) == extend_all(h, [b, a])) == (a == b)


def test_no_collisions_among_many_short_prefixes() -> None:
    seen = {extend_all(7, [a, b]) for a in range(300) for b in range(300)}
    assert len(seen) == 90_000


@pytest.mark.parametrize(
    "other",
    [
        initial(NoiseKey(seed=1)),
        initial(NoiseKey(temperature=1.0)),
        initial(NoiseKey(top_p=0.9)),
        initial(NoiseKey(top_k=5)),
        initial(NoiseKey(min_p=0.1)),
        initial(NoiseKey(), "rejection"),
        initial(NoiseKey(), "shared_noise", 0.5),
    ],
)
def test_initial_covers_what_shapes_a_draft(other: int) -> None:
    assert other != initial(NoiseKey())
    assert 0 <= other < 2**64


def test_initial_is_the_same_in_every_process() -> None:
    assert initial(NoiseKey()) == 4263817823084516518


@given(tokens, tokens)
def test_block_digest_names_content_and_parent(a: list[int], b: list[int]) -> None:
    root_a, root_b = block_digest(ROOT_DIGEST, a), block_digest(ROOT_DIGEST, b)
    assert len(root_a) == DIGEST_BYTES
    assert (root_a == root_b) == (a == b)
    assert (block_digest(root_a, a) == block_digest(root_b, a)) == (a == b)
    assert block_digest(root_a, a) != root_a
