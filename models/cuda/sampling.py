"""``SamplingKernels`` on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch

from models.cuda.candidates import best_scores
from models.cuda.noise import choose

Linear = Callable[[torch.Tensor, object, torch.Tensor | None], torch.Tensor]
"""``Backend.linear``."""


class CudaSampling:
    """The head's product, then noise, argmax and the best few by our kernels.

    Args:
        linear: the backend's own product, so that a token gets the same logits here as from a
            graph, as far as that product promises it.
    """

    def __init__(self, linear: Linear) -> None:
        self._linear = linear

    def head_argmax(
        self,
        hidden: torch.Tensor,
        weight: object,
        inverse_temperature: torch.Tensor,
        row_keys: torch.Tensor,
        vocab: int,
    ) -> torch.Tensor:
        head = cast(torch.Tensor, weight)
        logits = self._linear(hidden, head[:vocab] if vocab else head, None)
        return self.noised_argmax(logits, inverse_temperature, row_keys)

    def noised_argmax(
        self, logits: torch.Tensor, inverse_temperature: torch.Tensor, row_keys: torch.Tensor
    ) -> torch.Tensor:
        device = logits.device
        return choose(logits, row_keys.to(device), inverse_temperature.to(device))

    def noised_topk(
        self,
        logits: torch.Tensor,
        count: int,
        inverse_temperature: torch.Tensor,
        row_keys: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        device = logits.device
        return best_scores(logits, row_keys.to(device), inverse_temperature.to(device), count)
