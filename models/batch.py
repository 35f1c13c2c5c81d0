"""What one forward pass reads besides weights and KV."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch


class RowLayout(NamedTuple):
    """What the host knows of a batch of whole rows, each of consecutive tokens.

    Row i holds ``counts[i]`` tokens at positions ``stops[i] - counts[i]`` .. ``stops[i] - 1`` of
    block table ``tables[i]``. int64 [R], int64 [R], int32 [R, max_blocks].
    """

    counts: np.ndarray
    stops: np.ndarray
    tables: np.ndarray


@dataclass(slots=True)
class ForwardBatch:
    """T tokens of R sequences, in one flat batch.

    A token sees the first ``context_lens`` positions of its sequence's block table (its own
    position included when it lives there) and then the ``suffix_lens`` first slots of its
    ``suffix_slots`` (its own slot last when it is part of a branch). Trunk tokens have suffix
    length 0; tokens of one sequence at rising positions with context_lens = position + 1 are plain
    causal attention. K/V of every token of the batch is written before any token attends.

    Attributes:
        tokens: int64 [T].
        positions: int64 [T], rotary positions.
        slots: int64 [T], flat KV slot (block * block_size + offset) each token writes.
        seqs: int32 [T], row of ``block_tables`` each token belongs to.
        block_tables: int32 [R, max_blocks].
        context_lens: int32 [T].
        suffix_slots: int32 [T, S] or None if no token has a suffix.
        suffix_lens: int32 [T] or None likewise.
        logit_index: int64 [L], tokens whose logits are wanted, rising.
        plan: what a backend derived from the batch in this forward, to use it again in the next
            layer; ``Transformer.forward`` clears it first, as tensors may be refilled in place.
        layout: the rows on the host, where whoever made the batch knows them to be plain text.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    seqs: torch.Tensor
    block_tables: torch.Tensor
    context_lens: torch.Tensor
    logit_index: torch.Tensor
    suffix_slots: torch.Tensor | None = None
    suffix_lens: torch.Tensor | None = None
    plan: object | None = None
    layout: RowLayout | None = field(default=None, kw_only=True)
