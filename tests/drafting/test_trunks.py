"""The draft's sequences: their blocks come back, and what lags behind is fed piece by piece."""

from __future__ import annotations

import pytest

from ipc.messages.draft import DraftRow, DraftStart
from ipc.messages.sampling import NoiseKey
from ssd_pipe.drafting.trunk import mark_fed
from ssd_pipe.drafting.trunks import PREFILL_CHUNK, Trunks
from ssd_pipe.engine.blocks import BlockManager

BLOCK, K = 4, 3


def trunks_of(blocks: int, *prompts: list[int]) -> tuple[Trunks, BlockManager]:
    manager = BlockManager(blocks, BLOCK)
    trunks = Trunks(manager, None, K)
    for slot, tokens in enumerate(prompts):
        trunks.begin(DraftStart(slot, slot, NoiseKey(), tokens))
    return trunks, manager


def row_of(slot: int, length: int, tokens: list[int]) -> DraftRow:
    return DraftRow(slot, length, tokens, [], fork=True, prefix_hash=0)


def prefill(trunks: Trunks) -> list[int]:
    """Feed all that lags; the sizes of the pieces."""
    sizes = []
    while (feed := trunks.lagging_chunk()) is not None:
        mark_fed([feed])
        trunks.register(feed[0])
        sizes.append(len(feed[2]))
    return sizes


def test_a_prompt_is_fed_in_chunks_up_to_its_last_token() -> None:
    prompt = list(range(2 * PREFILL_CHUNK + 10))
    trunks, _ = trunks_of(200, prompt)
    assert prefill(trunks) == [PREFILL_CHUNK, PREFILL_CHUNK, 9]
    assert trunks[0].written == prompt[:-1]
    assert trunks[0].feed_start() == len(prompt) - 1


def test_blocks_come_back_and_prefixes_are_found_again() -> None:
    prompt = list(range(30))
    trunks, manager = trunks_of(50, prompt)
    prefill(trunks)
    trunks.commit(row_of(0, 30, [70, 71, 72]))
    assert trunks[0].tokens == [*prompt, 70, 71, 72]
    assert trunks.catch_up(trunks[0], K)
    assert manager.num_free == 50 - -(-(33 + K) // BLOCK)
    assert trunks.drop(0)
    assert not trunks.drop(0)
    assert 0 not in trunks
    assert manager.num_free == 50
    trunks.begin(DraftStart(1, 1, NoiseKey(), prompt))
    assert trunks[1].agreed == 28  # whole blocks of what had been fed
    assert prefill(trunks) == [1]


def test_a_gap_is_refused() -> None:
    trunks, _ = trunks_of(10, [1, 2, 3])
    with pytest.raises(ValueError, match="scheduler counts 4"):
        trunks.commit(row_of(0, 4, [5]))


def test_a_round_takes_in_one_chunk_of_lag() -> None:
    usual = K + 2  # what rounds leave anyway
    half = [1] * (PREFILL_CHUNK // 2 + usual)
    trunks, _ = trunks_of(500, half, half, half, [1] * usual)
    for _ in range(2):
        trunks.begin_round()
        assert [trunks.catch_up(trunks[slot], K) for slot in trunks.slots] == [
            True,
            True,
            False,
            True,
        ]


def test_without_blocks_a_row_sits_out() -> None:
    trunks, manager = trunks_of(2, [1, 2, 3], [4, 5, 6])
    trunks.begin_round()
    assert trunks.catch_up(trunks[0], K)
    assert not trunks.catch_up(trunks[1], K)
    assert trunks.lagging_chunk() is not None
    assert manager.num_free == 0
    trunks.drop(0)
    assert trunks.catch_up(trunks[1], K)
