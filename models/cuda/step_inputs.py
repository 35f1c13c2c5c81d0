"""What the host writes for one launch of a step: a few numbers and a block table a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from ipc.messages.sampling import GREEDY_BELOW
from models.cuda.staging import Field, Staging

if TYPE_CHECKING:
    from models.cuda.graphs import StepRow


class StepInputs(Staging):
    """Arrays for R rows of up to W tokens in tables of up to ``num_blocks`` blocks of ``page``
    positions: "tokens", "streams" int64 [R, W]; "starts", "seeds" int64, "counts" int32 and
    "factors" float32 [R]; "tables" int32 [R, num_blocks]."""

    def __init__(
        self, rows: int, width: int, num_blocks: int, page: int, device: torch.device
    ) -> None:
        super().__init__(
            [
                Field("tokens", (rows, width), torch.int64),
                Field("streams", (rows, width), torch.int64),
                Field("starts", (rows,), torch.int64),
                Field("seeds", (rows,), torch.int64),
                Field("counts", (rows,), torch.int32),
                Field("factors", (rows,), torch.float32),
                Field("tables", (rows, num_blocks), torch.int32),
            ],
            device,
        )
        self._page = page

    def write(self, rows: Sequence[StepRow]) -> None:
        """Rows on the host; the rest of the R are none. Raises ValueError if they do not fit."""
        self.wait()
        host = self.host
        most, width = host["tokens"].shape
        num_blocks = host["tables"].shape[1]
        if not 0 < len(rows) <= most:
            raise ValueError(f"{len(rows)} rows in a graph of {most}")
        host["counts"][len(rows) :] = 0
        for i, row in enumerate(rows):
            count, blocks = len(row.tokens), len(row.blocks)
            if not 0 < count <= width or blocks > num_blocks:
                raise ValueError(
                    f"row {i}: {count} tokens and {blocks} blocks in a graph of {width} "
                    f"tokens and {num_blocks} blocks"
                )
            if row.start + count > blocks * self._page:
                raise ValueError(f"row {i}: {blocks} blocks do not hold its tokens")
            host["tokens"][i, :count] = row.tokens
            host["tokens"][i, count:] = 0
            host["streams"][i, :count] = row.streams
            host["starts"][i] = row.start
            host["seeds"].view(np.uint64)[i] = row.seed
            host["counts"][i] = count
            greedy = row.temperature < GREEDY_BELOW
            host["factors"][i] = 0.0 if greedy else 1.0 / row.temperature
            host["tables"][i, :blocks] = row.blocks

    def write_none(self) -> None:
        """No row is any; nothing comes of a launch on that, and no KV is written."""
        self.wait()
        self.host["counts"].fill(0)
