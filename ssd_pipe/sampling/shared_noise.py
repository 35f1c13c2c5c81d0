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

from ipc.messages.sampling import NoiseKey
from models.backends.base import SamplingKernels
from models.transformer import Transformer
from ssd_pipe.sampling.filters import RowSampling, filtered_logits
from ssd_pipe.sampling.noise import SHARED, gumbel_argmax


def choose(
    logits: torch.Tensor,
    sampling: RowSampling,
    positions: Sequence[int] | np.ndarray,
    kernels: SamplingKernels | None = None,
) -> torch.Tensor:
    """One token a row: argmax(filtered logits / T + g); plain argmax on greedy rows.

    Args:
        logits: float [N, V].
        sampling: settings of the N rows.
        positions: N indices in the sequence of the tokens being chosen.
        kernels: the device's compiled sampling, if it has any.

    Returns:
        int64 [N] on the device of ``logits``.
    """
    return sample(logits, sampling, positions, SHARED, kernels)


def choose_from(
    model: Transformer,
    hidden: torch.Tensor,
    sampling: RowSampling,
    positions: Sequence[int] | np.ndarray,
    vocab: int = 0,
) -> torch.Tensor:
    """``choose`` straight from hidden states [N, H], without storing logits where that works.

    ``vocab`` > 0 chooses among the first so many token ids only.
    """
    kernels = model.backend.sampling
    if kernels is not None and model.tp.size == 1 and sampling.unfiltered:
        keys = sampling.noise_keys(positions, SHARED, hidden.device)
        return model.head_argmax(hidden, sampling.inverse_temperature(), keys, vocab)
    logits = model.logits(hidden, vocab)
    if logits is None:
        raise RuntimeError("only tensor-parallel rank 0 chooses tokens")
    return choose(logits, sampling, positions, kernels)


def sample(
    logits: torch.Tensor,
    sampling: RowSampling,
    positions: Sequence[int] | np.ndarray,
    streams: int | np.ndarray,
    kernels: SamplingKernels | None = None,
) -> torch.Tensor:
    """``choose`` with the noise of any Gumbel stream, one for all rows or one a row."""
    if sampling.greedy.all() and kernels is None:
        return logits.argmax(dim=-1)
    keys = sampling.noise_keys(positions, streams, logits.device)
    if kernels is not None:
        inverse = sampling.inverse_temperature()
        if not sampling.unfiltered:
            logits = filtered_logits(logits, sampling)
            inverse = inverse.sign()  # tempered already
        return kernels.noised_argmax(logits, inverse, keys)
    scores = filtered_logits(logits, sampling)
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
    kernels: SamplingKernels | None = None,
) -> list[tuple[int, int]]:
    """Outcomes (k, token) of a batch of chains.

    Args:
        logits: the target's, float [sum(K_i + 1), V]; chain i's rows are consecutive, the first of
            them chooses position ``starts[i]``.
        chains: proposals, any length from 0.
        keys: noise keys of the requests.
        starts: position of each chain's first token.
        kernels: the device's compiled sampling, if it has any.
    """
    positions = chain_positions(chains, starts)
    return outcomes(choose(logits, chain_sampling(keys, chains), positions, kernels), chains)


def judge_from(
    model: Transformer,
    hidden: torch.Tensor,
    chains: Sequence[Sequence[int]],
    keys: Sequence[NoiseKey],
    starts: Sequence[int],
) -> list[tuple[int, int]]:
    """``judge`` straight from the target's hidden states [sum(K_i + 1), H]."""
    positions = chain_positions(chains, starts)
    return outcomes(choose_from(model, hidden, chain_sampling(keys, chains), positions), chains)


def chain_sampling(keys: Sequence[NoiseKey], chains: Sequence[Sequence[int]]) -> RowSampling:
    """Settings of the sum(K_i + 1) logits rows of a batch of chains."""
    return RowSampling.from_keys(keys, [len(chain) + 1 for chain in chains])


def outcomes(choices: torch.Tensor, chains: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Outcomes from the target's own choices at all positions, int64 [sum(K_i + 1)]."""
    flat, judged, row = choices.tolist(), [], 0
    for chain in chains:
        judged.append(accept_chain(flat[row : row + len(chain) + 1], chain))
        row += len(chain) + 1
    return judged
