"""Passes at start-up meet every kind of length, and stay within the KV there is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from models.batch import ForwardBatch
from models.kv_cache import KVCache
from models.registry import load_model
from models.transformer import Transformer
from ssd_pipe.first_passes import lengths_up_to, make_first_passes, table_widths
from tests.models.tiny import make_tiny


@pytest.mark.parametrize("most", [1, 2, 31, 32, 100, 512])
def test_lengths_are_of_every_kind(most: int) -> None:
    lengths = lengths_up_to(most)
    assert lengths == sorted(set(lengths))
    assert lengths[0] == 1
    assert lengths[-1] <= most
    assert {n for n in (1, 2, 16, 32, 64, 128, 256, 512) if n <= most} <= set(lengths)
    for low in (16, 32, 64, 128, 256):
        if 2 * low <= most:
            assert any(low < n < 2 * low and n % 16 for n in lengths)


@pytest.mark.parametrize("whole", [1, 3, 20, 513, 2048])
@pytest.mark.parametrize("needed", [1, 2, 13, 16, 32])
def test_tables_are_of_every_kind(needed: int, whole: int) -> None:
    widths = table_widths(needed, whole) if needed <= whole else [needed]
    assert widths == sorted(set(widths))
    assert widths[0] == needed
    assert widths[-1] <= max(whole, needed)
    assert len(widths) <= 6
    if whole > 500:
        near = [width for width in widths if width <= needed + 16]
        far = [width for width in widths if width > 400]
        for some in (near, far):
            assert {width % 16 == 0 for width in some if width > 1} == {True, False}


def passes(model: Transformer, blocks: int, positions: int) -> list[tuple[int, int]]:
    """Tokens and table width of each pass over so many blocks of KV, which are of 4 tokens."""
    met: list[tuple[int, int]] = []
    forward = model.forward

    def noted(batch: ForwardBatch, kv: KVCache) -> torch.Tensor:
        met.append((len(batch.tokens), batch.block_tables.shape[1]))
        return forward(batch, kv)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "forward", noted)
        made = make_first_passes(model, model.make_kv(blocks, 4), 512, positions, choose=True)
    assert made == len(met) > 4
    return met


def test_ranks_with_unequal_kv_make_the_same_passes(tmp_path: Path) -> None:
    model = load_model(make_tiny(tmp_path), backend="reference")
    some, more = (passes(model, blocks, 100) for blocks in (25, 400))
    assert some == more
    assert max(length for length, _ in some) > 64


@pytest.mark.parametrize("blocks", [3, 40])
def test_no_pass_reaches_beyond_the_kv(tmp_path: Path, blocks: int) -> None:
    model = load_model(make_tiny(tmp_path), backend="reference")
    kv = model.make_kv(blocks, 4)
    untouched = kv.keys[0].clone()
    assert make_first_passes(model, kv, 64, 1000, choose=True) >= 4
    written = (kv.keys[0] != untouched).flatten(1).any(1)
    longest = lengths_up_to(min(64, 4 * blocks))[-1]
    assert torch.equal(written, torch.arange(blocks) < -(-longest // 4))
