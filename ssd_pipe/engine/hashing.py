"""Hashes of token prefixes: a fast 64-bit chain for speculation, a strong one for prefix caching.

The speculation cache is keyed by the 64-bit chain. A collision there hands back a chain that is
only a proposal, so speed matters more than strength. A prefix-cache hit, however, is taken as
truth about KV contents, so blocks are named by a 128-bit cryptographic digest.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterable, Sequence

import msgspec

from ipc.messages.sampling import NoiseKey

MASK = 2**64 - 1
DIGEST_BYTES = 16
ROOT_DIGEST = bytes(DIGEST_BYTES)
"""Parent of a sequence's first block."""

_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def initial(key: NoiseKey, rule: str = "shared_noise", saguaro_c: float = 1.0) -> int:
    """Prefix hash before the first token, covering everything but tokens that shapes a draft.

    Returns:
        An integer in [0, 2**64).
    """
    settings = struct.pack(
        "<qdddqd", key.seed, key.temperature, key.top_p, key.min_p, key.top_k, saguaro_c
    )
    settings += rule.encode()
    if key.processors is not None:
        settings += msgspec.msgpack.encode(key.processors)
    digest = hashlib.blake2b(settings, digest_size=8).digest()
    return int.from_bytes(digest, "little")


def extend_all(h: int, tokens: Iterable[int]) -> int:
    """Prefix hash of the prefix hashed as ``h`` followed by ``tokens``.

    One round of splitmix64 (Steele, Lea, Flood 2014) a token: a bijection of ``h`` for a fixed
    token and of the token (mod 2**64) for a fixed ``h``, so siblings never collide.
    """
    for token in tokens:
        z = (h + (token + 1) * _GAMMA) & MASK
        z = ((z ^ (z >> 30)) * _MIX_1) & MASK
        z = ((z ^ (z >> 27)) * _MIX_2) & MASK
        h = z ^ (z >> 31)
    return h


def block_digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Digest (16 bytes, blake2b) of a full block, chained to its ``parent`` block's digest.

    The first block's parent is ``ROOT_DIGEST``; equal digests mean equal tokens from position 0 on.
    """
    return hashlib.blake2b(array("q", tokens), digest_size=DIGEST_BYTES, key=parent).digest()
