"""The head's product of a step on a graph, whole or of the first tokens of the vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from models.transformer import Transformer

if TYPE_CHECKING:
    from models.backends.cuda import CudaBackend


def head_logits(
    model: Transformer, hidden: torch.Tensor, vocab: int = 0, out: torch.Tensor | None = None
) -> torch.Tensor:
    """[L, H] -> [L, V] in the activation dtype, contiguous, the same on every rank.

    ``vocab`` > 0: of the first so many tokens only. ``out``: where to put them.
    """
    head = model.head
    if model.tp.size > 1:
        logits = model.tp.all_gather_logits(head(hidden), model.config.vocab_size)
        logits = logits[:, :vocab].contiguous() if vocab else logits
        return logits if out is None else out.copy_(logits)
    if out is None:
        return head.first(hidden, vocab) if vocab else head(hidden)
    backend = cast("CudaBackend", model.backend)
    weight = backend.first_rows(head.weight, vocab) if vocab else head.weight
    bias = head.bias[:vocab] if vocab and head.bias is not None else head.bias
    return backend.linear(hidden, weight, bias, out)
