"""Speculative sampling by rejection, with noise the draft knows.

Leviathan et al., arXiv 2211.17192, and Chen et al., arXiv 2302.01318: a proposal x drawn from q is
accepted with probability min(1, p(x) / q(x)); otherwise a recovery token is drawn from the residual
max(p - q, 0), normalised; after a chain accepted whole a bonus token is drawn from p. The uniform
of the test and the Gumbel noise of recovery and bonus tokens are functions of the request's seed
and the position (``noise.round_stream`` says why the round enters too), so a draft can
fork on log q + g.

q must be the very distribution the proposal was drawn from, filters and Saguaro's factor included.
A deterministic proposal (n-gram, say) is a point mass: accepted with p(x), recovered from p
without x.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ipc.messages.sampling import NoiseKey
from ssd_pipe.sampling.filters import RowSampling, filtered_logits
from ssd_pipe.sampling.noise import (
    ACCEPT,
    RESIDUAL,
    gumbel_argmax,
    round_stream,
    row_keys,
    uniforms,
)
from ssd_pipe.sampling.shared_noise import accept_chain


def judge(
    logits: torch.Tensor,
    chains: Sequence[Sequence[int]],
    keys: Sequence[NoiseKey],
    starts: Sequence[int],
    q: Sequence[torch.Tensor | None],
    lost: Sequence[bool] | None = None,
) -> list[tuple[int, int]]:
    """Outcomes (k, token) of a batch of chains.

    Args:
        logits: the target's, float [sum(K_i + 1), V]; chain i's rows are consecutive, the first of
            them chooses position ``starts[i]``.
        chains: proposals, any length from 0.
        keys: noise keys of the requests; greedy rows accept what equals the argmax.
        starts: position of each chain's first token.
        q: per chain the distributions its tokens were drawn from, float [K_i or more, V], or None
            for a deterministic chain.
        lost: chains that were drawn from distributions nobody has any more. Nothing of them is
            accepted and the token is sampled from p, which is exact; greedy chains do not care.
    """
    counts = [len(chain) + 1 for chain in chains]
    first = np.cumsum([0, *counts[:-1]]) if counts else np.zeros(0, np.int64)
    sampling = RowSampling.from_keys(keys)
    scores = filtered_logits(logits, RowSampling.from_keys(keys, counts))
    outcomes = [(0, 0)] * len(chains)
    for i in np.flatnonzero(sampling.greedy).tolist():
        choices = scores[first[i] : first[i] + counts[i]].argmax(dim=-1).tolist()
        outcomes[i] = accept_chain(choices, chains[i])
    rows = np.flatnonzero(~sampling.greedy)
    if rows.size == 0:
        return outcomes
    sampled = rows.tolist()
    alive = [i for i in sampled if lost is None or not lost[i]]
    accepted = dict.fromkeys(sampled, 0)
    accepted.update(_accepted_lengths(scores, first, alive, chains, keys, starts, q))
    lengths = [accepted[i] for i in sampled]
    proposals: list[torch.Tensor | int | None] = [None] * len(sampled)
    tested = set(alive)
    for n, (i, k) in enumerate(zip(sampled, lengths, strict=True)):
        if i in tested and k < len(chains[i]):
            own = q[i]
            proposals[n] = chains[i][k] if own is None else own[k]
    offsets = np.array(lengths, np.int64)
    final = torch.from_numpy(first[rows] + offsets).to(logits.device)
    weights = _residual(torch.softmax(scores[final], dim=-1), proposals)
    noise_keys = sampling.take(rows).noise_keys(
        np.asarray(starts, np.int64)[rows] + offsets,
        round_stream(RESIDUAL, offsets),
        logits.device,
    )
    tokens = gumbel_argmax(weights.log_(), noise_keys).tolist()
    for i, k, token in zip(sampled, lengths, tokens, strict=True):
        outcomes[i] = (k, token)
    return outcomes


def _accepted_lengths(
    scores: torch.Tensor,
    first: np.ndarray,
    alive: Sequence[int],
    chains: Sequence[Sequence[int]],
    keys: Sequence[NoiseKey],
    starts: Sequence[int],
    q: Sequence[torch.Tensor | None],
) -> dict[int, int]:
    """Accepted length of each sampled chain in ``alive``: all tests u <= p / q at once."""
    sizes = np.array([len(chains[i]) for i in alive], np.int64)
    ends = np.cumsum(sizes)
    if not sizes.any():
        return {}
    offsets = np.arange(ends[-1]) - np.repeat(ends - sizes, sizes)
    where = np.array(alive, np.int64)
    rows = torch.from_numpy(np.repeat(first[where], sizes) + offsets).to(scores.device)
    tokens = torch.tensor([t for i in alive for t in chains[i]], device=scores.device)
    logp = scores[rows, tokens] - torch.logsumexp(scores, dim=-1)[rows]
    p = logp.double().exp().cpu().numpy()
    proposed = np.ones(len(p))
    for i, end, size in zip(alive, ends.tolist(), sizes.tolist(), strict=True):
        own = q[i]
        if own is not None:
            part = tokens[end - size : end].to(own.device)[:, None]
            proposed[end - size : end] = own[:size].gather(1, part)[:, 0].float().cpu().numpy()
    seeds = np.array([keys[i].seed for i in alive], np.uint64)
    positions = np.repeat(np.asarray(starts, np.int64)[where], sizes) + offsets
    u = uniforms(row_keys(np.repeat(seeds, sizes), positions, round_stream(ACCEPT, offsets)))
    passed = ((p > 0) & (u * proposed <= p)).tolist()
    lengths = {}
    for i, end, size in zip(alive, ends.tolist(), sizes.tolist(), strict=True):
        part_passed = passed[end - size : end]
        lengths[i] = part_passed.index(False) if False in part_passed else size
    return lengths


def _residual(p: torch.Tensor, proposals: Sequence[torch.Tensor | int | None]) -> torch.Tensor:
    """Weights [S, V] the last tokens are drawn with, from p float32 [S, V]; not normalised.

    Where rounding leaves nothing of p - q, which p = q can bring about, p itself stands in; so it
    does for a q that is NaN, of a vocabulary in which nothing was allowed: it is never accepted.
    """
    weights = p.clone()
    for row, proposal in zip(weights, proposals, strict=True):
        if isinstance(proposal, int):
            row[proposal] = 0
        elif proposal is not None:
            row.sub_(proposal.to(row.device, row.dtype)).clamp_(min=0)
    empty = ~(weights.amax(dim=-1, keepdim=True) > 0)  # also where q is of nothing, and NaN
    return torch.where(empty, p, weights)
