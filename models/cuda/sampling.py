"""``SamplingKernels`` on a GPU."""

from __future__ import annotations

from typing import cast

import torch

from models.cuda.candidates import best_scores
from models.cuda.noise import choose


class CudaSampling:
    """The head's product, then noise, argmax and the best few by our kernels."""

    def head_argmax(
        self,
        hidden: torch.Tensor,
        weight: object,
        inverse_temperature: torch.Tensor,
        row_keys: torch.Tensor,
        vocab: int,
    ) -> torch.Tensor:
        head = cast(torch.Tensor, weight)
        logits = torch.nn.functional.linear(hidden, head[:vocab] if vocab else head)
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
