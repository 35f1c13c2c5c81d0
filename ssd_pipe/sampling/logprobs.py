"""Log probabilities of chosen tokens and of the most likely ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ipc.messages.target import Logprobs


def token_logprobs(
    logits: torch.Tensor, tokens: Sequence[int], counts: Sequence[int]
) -> list[Logprobs]:
    """One entry per row.

    Args:
        logits: the model's own, float [N, V], before bias, penalties, mask and temperature.
        tokens: chosen token of each row.
        counts: how many of the most likely tokens each row reports, from 0.
    """
    if not tokens:
        return []
    scores = logits.float()
    total = torch.logsumexp(scores, dim=-1, keepdim=True)
    own = scores.gather(1, torch.tensor(tokens, device=scores.device)[:, None])
    ranks = (scores > own).sum(dim=-1).add_(1).tolist()
    chosen = (own - total)[:, 0].tolist()
    width = min(max(counts), scores.shape[1])
    top = torch.topk(scores, width, dim=-1)
    ids, values = top.indices.tolist(), (top.values - total).tolist()
    return [
        Logprobs(chosen[i], ranks[i], ids[i][:count], values[i][:count])
        for i, count in enumerate(counts)
    ]


def chain_logprobs(
    raw: torch.Tensor,
    first: list[int],
    chains: list[list[int]],
    judged: list[tuple[int, int]],
    asked: list[int],
) -> list[list[Logprobs]]:
    """Of the tokens each chain's outcome emits; nothing where ``asked`` is negative.

    ``first`` are the chains' first rows in ``raw`` [sum(chain + 1), V].
    """
    rows: list[int] = []
    tokens: list[int] = []
    counts: list[int] = []
    for start, chain, (k, token), count in zip(first, chains, judged, asked, strict=True):
        if count >= 0:
            rows += range(start, start + k + 1)
            tokens += [*chain[:k], token]
            counts += [count] * (k + 1)
    index = torch.tensor(rows, dtype=torch.int64, device=raw.device)
    found = iter(token_logprobs(raw[index], tokens, counts))
    return [
        [next(found) for _ in range(k + 1)] if count >= 0 else []
        for (k, _), count in zip(judged, asked, strict=True)
    ]
