"""FlashInfer's paged attention, for pieces of prompts.

On an H200 (0.6.13, FA2 kernels, a layer of Llama-3.1-8B) it reads 2,048 tokens in 218 us and 512
after 7,680 in 298 us, our kernel in 254 and 334; 512 tokens at the start of a text take it 62 us
and ours 23. Decoding and verification stay with ours: after 512 positions it takes 8.9 and 9.5 us,
ours 6.3 and 9.7.

Its plan is made on the host from the batch's layout, once for all layers of a pass, without waiting
for the device. Its kernels are compiled at first use, which takes a minute; they are kept in
FlashInfer's own cache folder. Branches have no form there and stay with our kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from ipc.errors import ConfigError
from models.batch import ForwardBatch, RowLayout

WORKSPACE = 128 << 20
"""Bytes that FlashInfer asks to be given for its partial sums."""


def installed() -> bool:
    """Whether FlashInfer is here."""
    return find_spec("flashinfer") is not None


@dataclass(frozen=True, slots=True)
class FlashPlan:
    """Marks a batch whose rows ``FlashInferAttention`` has planned."""

    layout: RowLayout


class FlashInferAttention:
    """Causal attention of whole rows over the paged cache, in bfloat16.

    Raises ConfigError if FlashInfer is not installed or cannot compute in ``dtype``.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        if not installed():
            raise ConfigError(
                "attention", "flashinfer is not installed: pip install 'ssd-pipe[cuda]'"
            )
        if dtype != torch.bfloat16:
            raise ConfigError("attention", f"flashinfer computes in bfloat16, not {dtype}")
        self._device, self._dtype = device, dtype
        self._wrapper: Any = None

    def takes(self, batch: ForwardBatch) -> bool:
        """Whether the rows of ``batch`` are pieces of plain text, known to the host."""
        return batch.layout is not None and batch.suffix_lens is None

    def __call__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: ForwardBatch,
        scale: float,
    ) -> torch.Tensor:
        """q [T, heads, dim], caches [blocks, page, kv_heads, dim] -> [T, heads * dim].

        ``takes(batch)`` must hold.
        """
        layout = batch.layout
        if layout is None:
            raise ValueError("a batch without a layout cannot be planned on the host")
        if not isinstance(batch.plan, FlashPlan):
            self._plan(layout, q.shape[1], k_cache, scale)
            batch.plan = FlashPlan(layout)
        out: torch.Tensor = self._wrapper.run(q.contiguous(), (k_cache, v_cache))
        return out.view(q.shape[0], -1)

    def _plan(self, layout: RowLayout, heads: int, k_cache: torch.Tensor, scale: float) -> None:
        _, page, kv_heads, dim = k_cache.shape
        if self._wrapper is None:
            from flashinfer import BatchPrefillWithPagedKVCacheWrapper

            workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=self._device)
            self._wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
        pages = -(-layout.stops // page)
        indices = np.concatenate(
            [table[:count] for table, count in zip(layout.tables, pages, strict=True)]
        )
        self._wrapper.plan(
            _offsets(layout.counts),
            _offsets(pages),
            torch.from_numpy(indices.astype(np.int32)).to(self._device, non_blocking=True),
            torch.from_numpy((layout.stops - (pages - 1) * page).astype(np.int32)),
            heads,
            kv_heads,
            dim,
            page,
            causal=True,
            sm_scale=scale,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )


def _offsets(counts: np.ndarray) -> torch.Tensor:
    """[0, c0, c0 + c1, ...] as int32 on the host."""
    return torch.from_numpy(np.concatenate(([0], np.cumsum(counts))).astype(np.int32))
