"""Sampling parameters of one request."""

from __future__ import annotations

import math

import msgspec

from ssd_pipe.errors import RequestError

MAX_SEED = 2**63 - 1


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one request is sampled; the defaults are greedy decoding of 128 tokens.

    Attributes:
        max_tokens: most tokens generated; exact under speculation.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_p: keep the smallest set of tokens whose probability reaches this, in (0, 1].
        top_k: keep the k most likely tokens; 0 keeps all.
        min_p: drop tokens less likely than ``min_p`` times the most likely one, in [0, 1].
        seed: noise key; None lets the frontend draw one.
        ignore_eos: go on after an end-of-sequence token.
        stop: texts that end the answer; none of them is ever part of it.
        stop_token_ids: token ids that end the answer, besides the model's own.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()

    def validate(self) -> None:
        """Raise RequestError (400) naming the first field that is out of range."""

        def check(good: bool, field: str, message: str) -> None:
            if not good:
                raise RequestError(400, f"{message}, got {getattr(self, field)!r}", field)

        check(self.max_tokens >= 1, "max_tokens", "must be at least 1")
        check(
            math.isfinite(self.temperature) and 0 <= self.temperature <= 100,
            "temperature",
            "must be between 0 and 100",
        )
        check(0 < self.top_p <= 1, "top_p", "must be in (0, 1]")
        check(0 <= self.top_k < 2**31, "top_k", "must be 0 (off) or a positive count")
        check(0 <= self.min_p <= 1, "min_p", "must be in [0, 1]")
        check(self.seed is None or 0 <= self.seed <= MAX_SEED, "seed", f"must be 0..{MAX_SEED}")
        check(len(self.stop) <= 16, "stop", "at most 16 stop texts")
        check(all(0 < len(s) <= 256 for s in self.stop), "stop", "each 1 to 256 characters")
        check(len(self.stop_token_ids) <= 64, "stop_token_ids", "at most 64 ids")
        check(all(t >= 0 for t in self.stop_token_ids), "stop_token_ids", "ids must be >= 0")


class NoiseKey(msgspec.Struct, frozen=True, array_like=True):
    """What shapes one request's choice of token besides the logits; travels to target and draft.

    temperature 0 is greedy. ``seed`` keys the noise. The other fields are as in SamplingParams.
    """

    seed: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
