"""Passes at start-up, of the lengths that prompts have, before any sequence owns a block.

A GPU's kernels are compiled for kinds of shapes as they are first met, each in some tenths of a
second, and what is compiled is kept on disk; without this a request would wait for it.
"""

from __future__ import annotations

import torch

from ipc.messages.sampling import NoiseKey
from models.kv_cache import KVCache
from models.sequence_batch import build_batch
from models.transformer import Transformer
from ssd_pipe.sampling.filters import RowSampling
from ssd_pipe.sampling.shared_noise import choose_from

_PAGES = 16  # the step in block table widths that kernels are compiled for


def lengths_up_to(most: int) -> list[int]:
    """Lengths of every kind: powers of two, and between two of them one that is odd."""
    powers = [1 << i for i in range(most.bit_length()) if 1 << i <= most]
    between = [3 * power // 2 + 1 for power in powers]
    return sorted({*powers, *(length for length in between if length <= most)})


def table_widths(needed: int, whole: int) -> list[int]:
    """Widths of every kind that the block table of a pass can have, of which ``needed`` blocks are
    fed and which has at most ``whole``: no longer than needed, as behind a long cached prefix (in
    which attention is split), and between; each with and without a multiple of the step."""
    rounded = -(-needed // _PAGES) * _PAGES
    longest = whole // _PAGES * _PAGES
    kinds = {needed, needed + 1, needed + 2, rounded, longest, longest - 1, whole}
    one = {width for width in kinds if needed <= width <= whole}
    even = {width for width in one if width % _PAGES == 0}
    odd = sorted(width for width in one - even if width > 1)
    return sorted({needed, *even, *odd[:1], *odd[-1:]})


@torch.inference_mode()
def make_first_passes(
    model: Transformer, kv: KVCache, most_tokens: int, positions: int, choose: bool
) -> int:
    """Feed one sequence of every kind of length up to ``most_tokens``, in block tables of every
    kind of width; the KV of its blocks is overwritten. Returns how many passes there were.

    Args:
        positions: of the longest sequence. All tensor-parallel ranks have KV for one, while what
            they have in all may differ; they must make the same passes.
        choose: also the token after it, as the target does.
    """
    sampling = RowSampling.from_keys([NoiseKey()])
    passes, size = 0, kv.block_size
    whole = min(-(-positions // size), kv.num_blocks)
    for length in lengths_up_to(min(most_tokens, whole * size)):
        needed = -(-length // size)
        for width in table_widths(needed, whole):
            row = (list(range(width)), 0, [0] * length, length - 1)
            hidden = model.forward(build_batch([row], size, model.backend.device), kv)
            passes += 1
            if choose and model.tp.size > 1:
                model.logits(hidden)
            elif choose:
                choose_from(model, hidden, sampling, [length])
    return passes
