"""Which part of every weight a tensor-parallel rank holds; pure arithmetic.

Columns of q, k, v, gate and up and rows of o and down are split by head and by intermediate
feature, the embedding and the head by vocabulary (Megatron-LM, arXiv 1909.08053). Parts need not be
equal: whole KV groups go to one rank, so 3 KV heads over 2 ranks are 2 and 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from ipc.errors import ModelError
from models.config import ModelConfig

INTERMEDIATE_UNIT = 16
"""Intermediate features are split in multiples of this where it divides them: whole vectors."""


@dataclass(frozen=True, slots=True)
class Span:
    """Half-open range."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def times(self, factor: int) -> Span:
        return Span(self.start * factor, self.stop * factor)


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part.

    Attributes:
        heads, kv_heads: attention heads; every query head's KV head is here too.
        intermediate: features of the gated MLP.
        vocab: real vocabulary rows held; may be empty on the last ranks of a tiny vocabulary.
        vocab_rows: rows of this rank's table, ``vocab`` and then zero rows; the same on all ranks.
    """

    heads: Span
    kv_heads: Span
    intermediate: Span
    vocab: Span
    vocab_rows: int


def plan_shard(config: ModelConfig, rank: int, size: int) -> Shard:
    """Raises ModelError naming what cannot be split over ``size`` ranks."""
    if not 0 <= rank < size:
        raise ModelError(f"tensor parallel rank must be 0..{size - 1}, got {rank}")
    group = config.num_heads // config.num_kv_heads
    if config.num_kv_heads >= size:
        kv_heads = _even(config.num_kv_heads, rank, size)
        heads = kv_heads.times(group)
    else:
        copies, uneven = divmod(size, config.num_kv_heads)
        if uneven or copies > group:
            raise ModelError(
                f"{config.num_heads} heads with {config.num_kv_heads} KV heads cannot be split "
                f"over tp = {size}"
            )
        kv_head, copy = divmod(rank, copies)
        kv_heads = Span(kv_head, kv_head + 1)
        part = _even(group, copy, copies)
        heads = Span(kv_head * group + part.start, kv_head * group + part.stop)
    width = config.intermediate_size
    unit = INTERMEDIATE_UNIT if width % INTERMEDIATE_UNIT == 0 else 1
    unit = unit if width // unit >= size else 1
    if width < size:
        raise ModelError(f"intermediate_size {width} cannot be split over tp = {size}")
    rows = -(-config.vocab_size // size)
    vocab = Span(min(rank * rows, config.vocab_size), min((rank + 1) * rows, config.vocab_size))
    return Shard(heads, kv_heads, _even(width // unit, rank, size).times(unit), vocab, rows)


def _even(total: int, rank: int, size: int) -> Span:
    return Span(total * rank // size, total * (rank + 1) // size)
