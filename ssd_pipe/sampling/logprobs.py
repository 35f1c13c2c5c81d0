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
