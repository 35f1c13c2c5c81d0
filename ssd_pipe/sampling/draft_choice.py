"""What the draft does with its logits: propose tokens, and rank the outcomes to speculate on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from models.backends.base import SamplingKernels
from ssd_pipe.config import Rule
from ssd_pipe.errors import ConfigError
from ssd_pipe.sampling.filters import RowSampling, filtered_logits
from ssd_pipe.sampling.noise import (
    GUMBEL_MAX,
    RESIDUAL,
    SHARED,
    add_gumbel,
    gumbel_argmax,
    gumbel_at,
    round_stream,
)
from ssd_pipe.sampling.shared_noise import choose

Ints = Sequence[int] | np.ndarray


def saguaro(probs: torch.Tensor, fan_out: int, c: float) -> torch.Tensor:
    """Saguaro's draft distribution (Kumar et al., arXiv 2603.03251, Def. 14).

    The probabilities of the ``fan_out`` most likely tokens are multiplied by ``c`` in [0, 1] and
    the row is renormalised. c = 1 or fan_out = 0 gives ``probs`` back, and so does, row by row,
    c = 0 where nothing else has any probability. float32 [N, V] -> float32 [N, V].
    """
    if not 0 <= c <= 1:
        raise ConfigError("speculation.saguaro_c", f"must be 0..1, got {c!r}")
    if c == 1 or fan_out <= 0:
        return probs
    top = torch.topk(probs, min(fan_out, probs.shape[1]), dim=-1)
    changed = probs.scatter(1, top.indices, top.values * c)
    total = changed.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, changed / total, probs)


def propose(
    logits: torch.Tensor,
    sampling: RowSampling,
    positions: Ints,
    rule: Rule,
    offsets: Ints | None = None,
    saguaro_c: float = 1.0,
    fan_out: int = 0,
    kernels: SamplingKernels | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The draft's next token in each of N chains.

    Args:
        logits: the draft's, float [N, V].
        sampling: settings of the rows.
        positions: index in the sequence of the token each row chooses.
        rule: under "shared_noise" the token is argmax(filtered log q + g) with the target's g;
            under "rejection" it is a sample of q' that uses noise of its own.
        offsets: rejection only: how many tokens of its chain come before the one chosen.
        saguaro_c, fan_out: rejection only: see ``saguaro``.
        kernels: the device's compiled sampling, if it has any.

    Returns:
        int64 [N] tokens, and under the rejection rule q' as float32 [N, V] (the distribution to
        judge them by; on greedy rows, where none is needed, the plain softmax), else None. None
        too when every row is greedy.
    """
    if rule == "shared_noise" or sampling.greedy.all():
        return choose(logits, sampling, positions, kernels), None
    probs = torch.softmax(filtered_logits(logits, sampling), dim=-1)
    probs = saguaro(probs, fan_out, saguaro_c)
    streams = round_stream(SHARED, _required(offsets))
    keys = sampling.noise_keys(positions, streams, logits.device)
    if kernels is None:
        tokens = gumbel_argmax(probs.log(), keys)
    else:
        tokens = kernels.noised_argmax(probs.log(), torch.ones(len(sampling)), keys)
    if sampling.greedy.any():
        greedy = torch.from_numpy(np.flatnonzero(sampling.greedy)).to(logits.device)
        tokens[greedy] = logits[greedy].argmax(dim=-1)
    return tokens, probs


def fork_scores(
    logits: torch.Tensor,
    sampling: RowSampling,
    positions: Ints,
    rule: Rule,
    offsets: Ints | None = None,
) -> torch.Tensor:
    """Scores that rank the candidates for the token the target emits at each forked position.

    Shared noise: filtered log q + g with the target's g. Rejection: filtered log q + g of the
    residual. Greedy rows: the logits. Log q is meant up to a constant a row; tokens that could not
    even reach the unnoised peak with the largest noise there is may come back as -inf, filtered
    ones always do.

    Args:
        logits: the draft's, float [R, V].
        sampling: settings of the R rows.
        positions: index in the sequence of the token each row ranks.
        rule: the acceptance rule.
        offsets: rejection only: the row's accepted length k (its position minus the chain's start).

    Returns:
        float32 [R, V].
    """
    scores = filtered_logits(logits, sampling)
    if sampling.greedy.all():
        return scores
    streams: int | np.ndarray = SHARED
    if rule == "rejection":
        streams = round_stream(RESIDUAL, _required(offsets))
    keys = sampling.noise_keys(positions, streams, logits.device)
    if not sampling.greedy.any():
        return _noised(scores, keys)
    rows = torch.from_numpy(np.flatnonzero(~sampling.greedy)).to(logits.device)
    return scores.index_copy(0, rows, _noised(scores[rows], keys[rows]))


def fork_candidates(
    logits: torch.Tensor,
    sampling: RowSampling,
    positions: Ints,
    rule: Rule,
    chain_tokens: torch.Tensor,
    offsets: Ints | None = None,
    count: int = 64,
    kernels: SamplingKernels | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The best candidates of each forked position, and how the chain's own token fares there.

    Args:
        logits, sampling, positions, rule, offsets: as in ``fork_scores``.
        chain_tokens: int64 [R], the chain's token at each position, -1 where there is none.
        count: candidates a row, at most V.
        kernels: the device's compiled sampling, if it has any.

    Returns:
        tokens int64 [R, n] and scores float64 [R, n], best first (-inf: no such candidate), and the
        score of each chain token, float64 [R] (any number where there is none).
    """
    count = min(count, logits.shape[1])
    own = chain_tokens.clamp(min=0)[:, None]
    if kernels is not None and sampling.unfiltered:
        streams: int | np.ndarray = SHARED
        if rule == "rejection":
            streams = round_stream(RESIDUAL, _required(offsets))
        keys = sampling.noise_keys(positions, streams, logits.device)
        inverse = sampling.inverse_temperature().to(logits.device)
        values, tokens = kernels.noised_topk(logits, count, inverse, keys)
        sampled = inverse > 0
        own_scores = logits.gather(1, own)[:, 0] * torch.where(sampled, inverse, 1.0)
        own_scores += torch.where(sampled, gumbel_at(keys, own[:, 0]), 0.0)
    else:
        scores = fork_scores(logits, sampling, positions, rule, offsets)
        values, tokens = torch.topk(scores, count, dim=-1)
        own_scores = scores.gather(1, own)[:, 0]
    return tokens.cpu().numpy(), values.double().cpu().numpy(), own_scores.double().cpu().numpy()


def _noised(scores: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    return add_gumbel(scores, keys, scores.amax(dim=-1, keepdim=True) - GUMBEL_MAX)


def _required(offsets: Ints | None) -> Ints:
    if offsets is None:
        raise ConfigError("offsets", "the rejection rule needs each row's offset in its chain")
    return offsets
