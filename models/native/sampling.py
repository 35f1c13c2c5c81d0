"""Gumbel-max sampling on the CPU: fused head, noised argmax and top-n, noise.

Noise is that of ``ssd_pipe.sampling.noise``: a function of (row key, token id). Row keys are int64
[M] with the bits of the unsigned key. ``inverse_temperature`` is float32 [M]; 0 marks a greedy row,
scored by its plain logits. A score is ``logit * inverse_temperature + noise``; equal scores go to
the lower token id; scores that are NaN or -inf are never chosen while another one is there.
"""

from __future__ import annotations

from typing import cast

import torch

from models.native.library import dense, library, pointer, rows_of
from models.native.weights import PackedWeight

MAX_TOP = 64


class NativeSampling:
    """SamplingKernels protocol on these functions."""

    def head_argmax(
        self,
        hidden: torch.Tensor,
        weight: object,
        inverse_temperature: torch.Tensor,
        row_keys: torch.Tensor,
        vocab: int,
    ) -> torch.Tensor:
        packed = cast(PackedWeight, weight)
        if vocab:
            packed = packed.first(vocab)
        return head_argmax(hidden, packed, inverse_temperature, row_keys)[1]

    def noised_argmax(
        self, logits: torch.Tensor, inverse_temperature: torch.Tensor, row_keys: torch.Tensor
    ) -> torch.Tensor:
        return noised_argmax(logits, inverse_temperature, row_keys)[1]

    def noised_topk(
        self,
        logits: torch.Tensor,
        count: int,
        inverse_temperature: torch.Tensor,
        row_keys: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return noised_topk(logits, count, inverse_temperature, row_keys)


def gumbel_rows(row_keys: torch.Tensor, vocab: int) -> torch.Tensor:
    """Noise of tokens 0..vocab-1: int64 [M] -> float32 [M, vocab].

    The choices below skip the noise of most tokens; this is all of it, to check them against.
    """
    keys = _keys(row_keys)
    out = torch.empty((keys.shape[0], vocab))
    library().ssd_gumbel_rows(
        keys.data_ptr(), keys.shape[0], vocab, out.data_ptr(), torch.get_num_threads()
    )
    return out


def head_argmax(
    hidden: torch.Tensor,
    weight: PackedWeight,
    inverse_temperature: torch.Tensor | None = None,
    row_keys: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Top-1 of ``hidden`` [M, K] times ``weight`` [V, K] without storing the [M, V] product.

    Returns (scores float32 [M], token ids int64 [M]). The logits behind them are bitwise those of
    ``NativeBackend.linear``. Without temperatures all rows are greedy.
    """
    x = rows_of(hidden)
    m = x.shape[0]
    scale, keys = _noise(m, inverse_temperature, row_keys)
    values, indices = torch.empty(m), torch.empty(m, dtype=torch.int64)
    library().ssd_head_argmax(
        weight.address,
        x.data_ptr(),
        x.stride(0),
        m,
        pointer(scale),
        pointer(keys),
        values.data_ptr(),
        indices.data_ptr(),
        torch.get_num_threads(),
    )
    return values, indices


def noised_argmax(
    logits: torch.Tensor,
    inverse_temperature: torch.Tensor | None = None,
    row_keys: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Top-1 of each row of ``logits`` [M, V] -> (scores float32 [M], token ids int64 [M])."""
    x = rows_of(logits)
    m, vocab = x.shape
    scale, keys = _noise(m, inverse_temperature, row_keys)
    values, indices = torch.empty(m), torch.empty(m, dtype=torch.int64)
    library().ssd_noised_argmax(
        x.data_ptr(),
        x.stride(0),
        m,
        vocab,
        pointer(scale),
        pointer(keys),
        values.data_ptr(),
        indices.data_ptr(),
        torch.get_num_threads(),
    )
    return values, indices


def noised_topk(
    logits: torch.Tensor,
    count: int,
    inverse_temperature: torch.Tensor | None = None,
    row_keys: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` (1 to 64) highest scores of each row, highest first, ties by rising id.

    -> (float32 [M, count], int64 [M, count]); places for which a row has no score above -inf hold
    -inf and id -1. Raises ValueError for a count out of range.
    """
    if not 1 <= count <= MAX_TOP:
        raise ValueError(f"count must be 1..{MAX_TOP}, got {count}")
    x = rows_of(logits)
    m, vocab = x.shape
    scale, keys = _noise(m, inverse_temperature, row_keys)
    values = torch.empty((m, count))
    indices = torch.empty((m, count), dtype=torch.int64)
    library().ssd_noised_topk(
        x.data_ptr(),
        x.stride(0),
        m,
        vocab,
        count,
        pointer(scale),
        pointer(keys),
        values.data_ptr(),
        indices.data_ptr(),
        torch.get_num_threads(),
    )
    return values, indices


def _keys(row_keys: torch.Tensor) -> torch.Tensor:
    if row_keys.dtype == torch.uint64:
        row_keys = row_keys.view(torch.int64)
    return dense(row_keys, torch.int64)


def _noise(
    m: int, inverse_temperature: torch.Tensor | None, row_keys: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    scale = None if inverse_temperature is None else dense(inverse_temperature, torch.float32)
    keys = None if row_keys is None else _keys(row_keys)
    for name, tensor in (("inverse_temperature", scale), ("row_keys", keys)):
        if tensor is not None and tensor.shape != (m,):
            raise ValueError(f"{name} must have shape ({m},), got {tuple(tensor.shape)}")
    return scale, keys
