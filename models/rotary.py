"""Rotary position tables (RoFormer, arXiv 2104.09864) with Llama 3's frequency scaling."""

from __future__ import annotations

import math

import torch

from models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Angle per position of each rotated pair, float32 [head_dim / 2].

    Kind "llama3" (Llama 3.1 model card): wavelengths longer than the original context divided by
    ``low_freq_factor`` are stretched by ``factor``, those shorter than it divided by
    ``high_freq_factor`` are kept, those between are blended.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inverse = 1.0 / torch.pow(rope.theta, exponents)
    if rope.kind == "default":
        return inverse
    turns = rope.original_max_positions * inverse / (2 * math.pi)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - keep) * inverse / rope.factor + keep * inverse


def rotary_tables(
    rope: RopeConfig, head_dim: int, max_positions: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin), each float32 [max_positions, head_dim / 2]."""
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rope, head_dim))
    return angles.cos().to(device), angles.sin().to(device)
