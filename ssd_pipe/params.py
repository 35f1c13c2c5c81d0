"""Sampling parameters of one request, and their limits. They travel as they are and so live in
``ipc.messages.sampling``; here users find them."""

from __future__ import annotations

from ipc.messages.sampling import (
    MAX_BIASES,
    MAX_CHOICES,
    MAX_FORMAT_BYTES,
    MAX_LOGPROBS,
    MAX_SEED,
    MAX_TIMEOUT,
    SamplingParams,
    derived_seed,
)

__all__ = [
    "MAX_BIASES",
    "MAX_CHOICES",
    "MAX_FORMAT_BYTES",
    "MAX_LOGPROBS",
    "MAX_SEED",
    "MAX_TIMEOUT",
    "SamplingParams",
    "derived_seed",
]
