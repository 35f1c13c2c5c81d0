"""Models of published shapes with random weights, to time what is not at hand."""

from __future__ import annotations

import torch

from models.backends.base import Backend
from models.checkpoint import RandomSource
from models.config import ModelConfig
from models.loader import build_transformer
from models.parallel import TensorParallel
from models.published import SHAPES, shape
from models.transformer import Transformer

__all__ = ["SHAPES", "build_random", "shape"]


def build_random(
    config: ModelConfig,
    backend: Backend,
    *,
    seed: int = 0,
    max_positions: int = 0,
    tp: TensorParallel | None = None,
) -> Transformer:
    """A model of random weights, each made on the backend's device in its activation dtype.

    Beyond the weights themselves it needs room for two of the largest matrices.
    ``max_positions`` 0 = all the model has.
    """
    source = RandomSource(backend.activation_dtype, torch.device(backend.device), seed)
    return build_transformer(config, source, backend, tp or TensorParallel(), max_positions)
