"""The shared-noise rule: every token is the target's own Gumbel-max sample.

The target's choice at a position is argmax(log p + g) with g a pure function of (seed, position,
token id); a proposal is accepted exactly when it equals that choice. What is emitted therefore
does not depend on the draft, the chain, or the batch; a draft that adds the same g to its own
logits proposes what the target is likely to choose.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ssd_pipe.params import NoiseKey
from ssd_pipe.sampling.filters import RowSampling, filtered_logits
from ssd_pipe.sampling.noise import SHARED, gumbel_argmax


def choose(
    logits: torch.Tensor, sampling: RowSampling, positions: Sequence[int] | np.ndarray
) -> torch.Tensor:
    """One token a row: argmax(filtered logits / T + g); plain argmax on greedy rows.

    Args:
        logits: float [N, V].
        sampling: settings of the N rows.
        positions: N indices in the sequence of the tokens being chosen.

    Returns:
        int64 [N] on the device of ``logits``.
    """
    return sample(logits, sampling, positions, SHARED)


def sample(
    logits: torch.Tensor,
    sampling: RowSampling,
    positions: Sequence[int] | np.ndarray,
    streams: int | np.ndarray,
) -> torch.Tensor:
    """``choose`` with the noise of any Gumbel stream, one for all rows or one a row."""
    if sampling.greedy.all():
        return logits.argmax(dim=-1)
    scores = filtered_logits(logits, sampling)
    keys = sampling.noise_keys(positions, streams, logits.device)
    if not sampling.greedy.any():
        return gumbel_argmax(scores, keys)
    tokens = scores.argmax(dim=-1)
    sampled = torch.from_numpy(np.flatnonzero(~sampling.greedy)).to(logits.device)
    tokens[sampled] = gumbel_argmax(scores[sampled], keys[sampled])
    return tokens


def accept_chain(choices: Sequence[int], chain: Sequence[int]) -> tuple[int, int]:
    """Outcome (k, token): the chain's first k tokens equal the target's choices, then its own.

    ``choices`` holds one token more than ``chain``.
    """
    k = 0
    while k < len(chain) and chain[k] == choices[k]:
        k += 1
    return k, choices[k]


def chain_positions(chains: Sequence[Sequence[int]], starts: Sequence[int]) -> np.ndarray:
    """Positions of the sum(K_i + 1) logits rows of a batch of chains, int64."""
    return np.concatenate(
        [
            np.arange(start, start + len(chain) + 1)
            for chain, start in zip(chains, starts, strict=True)
        ]
        or [np.zeros(0, np.int64)]
    )


def judge(
    logits: torch.Tensor,
    chains: Sequence[Sequence[int]],
    keys: Sequence[NoiseKey],
    starts: Sequence[int],
) -> list[tuple[int, int]]:
    """Outcomes (k, token) of a batch of chains.

    Args:
        logits: the target's, float [sum(K_i + 1), V]; chain i's rows are consecutive, the first of
            them chooses position ``starts[i]``.
        chains: proposals, any length from 0.
        keys: noise keys of the requests.
        starts: position of each chain's first token.
    """
    counts = [len(chain) + 1 for chain in chains]
    sampling = RowSampling.from_keys(keys, counts)
    choices = choose(logits, sampling, chain_positions(chains, starts)).tolist()
    outcomes, row = [], 0
    for chain, count in zip(chains, counts, strict=True):
        outcomes.append(accept_chain(choices[row : row + count], chain))
        row += count
    return outcomes
