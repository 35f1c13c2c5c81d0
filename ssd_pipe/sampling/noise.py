"""Counter-based noise: a pure function of (request seed, position, stream, token id).

Nothing is drawn and nothing is stored, so every process that knows a request's seed knows its
noise. Rows are keyed once (``row_keys``); tokens of a row are numbered by the counter of SplitMix64
(Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014), whose
finaliser is the hash.

For row key ``r`` and token id ``t``, in 64-bit wrap-around arithmetic and float32::

    h = finalise(r + (t + 1) * 0x9E3779B97F4A7C15)
    u = min((float32(h >> 32) + 0.5) * 2^-32, 1 - 2^-24)
    g = -log(-log1p(-u))                                  # standard Gumbel

Small ``u`` is the large noise, so float32 is finest where it decides; ``u`` stays off 0 and 1, and
``g`` lies in [-2.82, GUMBEL_MAX].
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

SHARED = 0
"""Gumbel noise of the target's choice (shared noise) and of the draft's proposals (both rules)."""
RESIDUAL = 1
"""Gumbel noise of recovery and bonus tokens under rejection sampling."""
ACCEPT = 2
"""Uniforms of the acceptance test under rejection sampling."""

GUMBEL_MAX = 22.88
"""Upper bound of the noise: -log(-log1p(-2^-33)) = 22.8738..."""

_GOLDEN = 0x9E3779B97F4A7C15
_MUL1 = 0xBF58476D1CE4E5B9
_MUL2 = 0x94D049BB133111EB
_CPU_BLOCK = 1 << 16  # elements a pass; keeps the int64 buffers in the caches


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def row_keys(
    seeds: np.ndarray | Sequence[int],
    positions: np.ndarray | Sequence[int],
    streams: np.ndarray | Sequence[int] | int,
) -> np.ndarray:
    """Keys of rows of noise: three broadcastable integer arrays -> uint64 [N].

    A position is the index in the sequence of the token being chosen. Each argument is taken modulo
    2^64 and mixed in on its own, so no two arguments can cancel each other out.
    """
    z = np.zeros(1, np.uint64)
    for words in (seeds, positions, streams):
        word = np.atleast_1d(np.asarray(words)).astype(np.uint64)
        z = z + (word + np.uint64(1)) * np.uint64(_GOLDEN)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(_MUL1)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(_MUL2)
        z = z ^ (z >> np.uint64(31))
    return z


def round_stream(stream: int, offsets: np.ndarray | Sequence[int] | int) -> np.ndarray:
    """The stream of a round's ``offsets``-th position, for noise that is fresh in every round.

    Under rejection sampling the draft lets its knowledge of a round's noise decide what it
    speculates on, hence whether the next chain comes from the cache or from a backup with another
    distribution. Were that noise used again for the same positions in the next round, the kind of
    proposal would depend on the noise that judges it, and the output would be biased. So this
    rule's noise is a function of (seed, position, offset of the position in its round). Under
    shared noise the emitted token does not depend on the proposal, and no such care is needed.
    """
    return stream + 4 * np.asarray(offsets, np.int64)


def keys_to_tensor(keys: np.ndarray, device: torch.device | str = "cpu") -> torch.Tensor:
    """uint64 [N] row keys -> int64 [N] with the same bits, the form ``gumbel`` takes."""
    return torch.from_numpy(np.ascontiguousarray(keys).view(np.int64)).to(device)


def uniforms(keys: np.ndarray) -> np.ndarray:
    """Uniforms of row keys: uint64 [N] -> float64 [N] strictly inside (0, 1), 52 random bits."""
    z = (keys ^ (keys >> np.uint64(30))) * np.uint64(_MUL1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_MUL2)
    z = z ^ (z >> np.uint64(31))
    return ((z >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


@lru_cache(maxsize=8)
def _counters(vocab: int, device: torch.device) -> torch.Tensor:
    """int64 [V]: (t + 1) * golden ratio, wrapped."""
    counters = torch.arange(1, vocab + 1, dtype=torch.int64)
    return counters.mul_(_signed(_GOLDEN)).to(device)


def _xor_shift(z: torch.Tensor, bits: int, scratch: torch.Tensor) -> None:
    # int64 shifts are arithmetic; the mask clears the copies of the sign bit
    torch.bitwise_right_shift(z, bits, out=scratch)
    scratch.bitwise_and_((1 << (64 - bits)) - 1)
    z.bitwise_xor_(scratch)


def _noise_of(z: torch.Tensor, scratch: torch.Tensor, out: torch.Tensor) -> None:
    """Gumbel noise of int64 counters ``z`` (overwritten) into float32 ``out``."""
    _xor_shift(z, 30, scratch)
    z.mul_(_signed(_MUL1))
    _xor_shift(z, 27, scratch)
    z.mul_(_signed(_MUL2))
    _xor_shift(z, 31, scratch)
    out.copy_(z.bitwise_right_shift_(32).bitwise_and_(2**32 - 1))
    out.add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    out.neg_().log1p_().neg_().log_().neg_()


def gumbel(keys: torch.Tensor, vocab: int) -> torch.Tensor:
    """Gumbel noise of whole rows: int64 [N] row keys -> float32 [N, vocab], on their device."""
    counters = _counters(vocab, keys.device)
    rows = keys.shape[0]
    out = torch.empty((rows, vocab), dtype=torch.float32, device=keys.device)
    step = max(1, _CPU_BLOCK // max(1, vocab)) if keys.device.type == "cpu" else max(1, rows)
    for row in range(0, rows, step):
        z = keys[row : row + step, None] + counters
        _noise_of(z, torch.empty_like(z), out[row : row + step])
    return out


def gumbel_at(keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Gumbel noise of single tokens: int64 keys and token ids of one shape -> float32 likewise."""
    z = (tokens + 1).mul_(_signed(_GOLDEN)).add_(keys)
    out = torch.empty(z.shape, dtype=torch.float32, device=z.device)
    _noise_of(z, torch.empty_like(z), out)
    return out


def add_gumbel(scores: torch.Tensor, keys: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
    """Scores [N, V] plus their noise, float32 [N, V]; entries below ``floor`` [N, 1] may be -inf.

    On a CPU the hash costs more than reading the scores, so only what reaches the floor is hashed
    when that is a small part. Elsewhere, where counting would make the host wait, all of it is.
    """
    if scores.device.type == "cpu":
        index = torch.from_numpy(np.flatnonzero((scores >= floor).numpy()))
        if index.numel() * 4 < scores.numel():
            vocab = scores.shape[1]
            rows = torch.div(index, vocab, rounding_mode="floor")
            noised = gumbel_at(keys[rows], index - rows * vocab)
            noised += scores.reshape(-1)[index]
            out = torch.full(scores.shape, float("-inf"))
            out.view(-1)[index] = noised
            return out
    return gumbel(keys, scores.shape[1]).add_(scores)


def gumbel_argmax(scores: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """argmax over tokens of ``scores + gumbel``, the lower id on ties.

    ``scores`` float32 [N, V] are log-probabilities up to a constant a row (-inf never wins), so
    the result is a sample of softmax(scores). ``keys`` int64 [N]. Returns int64 [N].
    """
    peak, top = scores.max(dim=-1)
    # What lies further below the noised peak than any noise can lift loses; the slack covers
    # float32 rounding of large scores.
    floor = peak + gumbel_at(keys, top) - GUMBEL_MAX - peak.abs() * 1e-6
    return add_gumbel(scores, keys, floor[:, None]).argmax(dim=-1)
