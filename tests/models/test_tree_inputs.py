from __future__ import annotations

import numpy as np
import pytest
import torch

from models.cuda.tree_inputs import TreeHome, TreeStaging

HOME = TreeHome(
    number=1,
    homes=np.zeros(1, np.int64),
    hashes=np.zeros(1, np.int64),
    outcomes=np.empty(0, np.int64),
)


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ([[1, 2, 3, 4]], "row 0 of 4 blocks in a graph of 2 rows of 3"),
        ([[1], [2], [3]], "row 2 of 1 blocks in a graph of 2 rows of 3"),
    ],
)
def test_rows_that_do_not_fit_are_told_the_limits(tables: list[list[int]], words: str) -> None:
    staging = TreeStaging(2, 4, 3, 3, torch.device("cpu"))
    with pytest.raises(ValueError, match=words):
        staging.prepare(HOME, tables, [0.0] * len(tables))
