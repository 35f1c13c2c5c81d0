"""Passes at start-up meet every kind of length, and stay within the KV there is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from models.registry import load_model
from ssd_pipe.first_passes import lengths_up_to, make_first_passes
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


@pytest.mark.parametrize("blocks", [3, 40])
def test_no_pass_reaches_beyond_the_kv(tmp_path: Path, blocks: int) -> None:
    model = load_model(make_tiny(tmp_path), backend="reference")
    kv = model.make_kv(blocks, 4)
    untouched = kv.keys[0].clone()
    assert make_first_passes(model, kv, 64, choose=True) >= 4
    written = (kv.keys[0] != untouched).flatten(1).any(1)
    longest = lengths_up_to(min(64, 4 * blocks))[-1]
    assert torch.equal(written, torch.arange(blocks) < -(-longest // 4))
