from __future__ import annotations

import numpy as np
import pytest
import torch

from models.sequence_batch import BatchRow, build_batch


def test_rows_become_one_flat_batch() -> None:
    rows = [
        BatchRow([9, 4, 7], 6, [50, 51, 52], 1),
        BatchRow(np.array([2], np.int32), 0, [60, 61], 2),
        BatchRow([5, 8], 4, [70], 0),
    ]
    batch = build_batch(rows, 4)
    assert batch.tokens.tolist() == [50, 51, 52, 60, 61, 70]
    assert batch.positions.tolist() == [6, 7, 8, 0, 1, 4]
    assert batch.slots.tolist() == [18, 19, 28, 8, 9, 32]
    assert batch.seqs.tolist() == [0, 0, 0, 1, 1, 2]
    assert batch.block_tables.tolist() == [[9, 4, 7], [2, 0, 0], [5, 8, 0]]
    assert batch.context_lens.tolist() == [7, 8, 9, 1, 2, 5]
    assert batch.logit_index.tolist() == [1, 2, 5]
    assert batch.suffix_slots is None
    for name in ("tokens", "positions", "slots", "logit_index"):
        assert getattr(batch, name).dtype == torch.int64, name
    for name in ("seqs", "block_tables", "context_lens"):
        assert getattr(batch, name).dtype == torch.int32, name


def test_no_logits_wanted_gives_an_empty_index() -> None:
    batch = build_batch([([0], 0, [1, 2], 2)], 4)
    assert batch.logit_index.shape == (0,)
    assert batch.logit_index.dtype == torch.int64


def test_a_table_that_is_too_short_is_refused() -> None:
    build_batch([([0, 1], 6, [1, 2], 0)], 4)
    with pytest.raises(ValueError, match="row 0: 2 blocks of 4 do not hold position 8"):
        build_batch([([0, 1], 6, [1, 2, 3], 0)], 4)


@pytest.mark.parametrize("rows", [[], [([0], 0, [1], 0), ([1], 0, [], 0)]])
def test_empty_rows_are_refused(rows: list) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        build_batch(rows, 4)
