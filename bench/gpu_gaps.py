"""How close two tokens are in the target's own scores, where two engines chose differently."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from models.registry import load_model
from models.sequence_batch import build_batch
from models.transformer import Transformer
from ssd_pipe.hub import resolve
from ssd_pipe.params import SamplingParams
from ssd_pipe.sampling import noise

BLOCK = 16


class Gaps:
    """The target in bfloat16 on one device, loaded at the first question."""

    def __init__(self, model: str, device: str) -> None:
        self._model = model
        self._device = device
        self._loaded: Transformer | None = None

    @torch.inference_mode()
    def between(self, text: Sequence[int], a: int, b: int, params: SamplingParams) -> float:
        """|score(a) - score(b)| after ``text``: logits, or tempered logits with shared noise."""
        if self._loaded is None:
            if self._device.startswith("cuda"):
                torch.cuda.set_device(self._device)
            self._loaded = load_model(resolve(self._model), device=self._device)
        model = self._loaded
        blocks = -(-len(text) // BLOCK)
        batch = build_batch(
            [(list(range(blocks)), 0, list(text), len(text) - 1)], BLOCK, self._device
        )
        logits = model.logits(model.forward(batch, model.make_kv(blocks, BLOCK)))
        if logits is None:
            raise RuntimeError("this rank has no logits")
        scores = logits[0]
        if params.temperature > 0:
            key = noise.keys_to_tensor(
                noise.row_keys([params.seed or 0], [len(text)], noise.SHARED), self._device
            )
            scores = scores / params.temperature + noise.gumbel(key, scores.shape[0])[0]
        return abs(float(scores[a] - scores[b]))
