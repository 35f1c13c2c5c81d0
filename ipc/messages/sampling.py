"""How the tokens of one request are chosen: as clients say it, and as target and draft need it."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import msgspec

from ipc.errors import RequestError, shown

MAX_SEED = 2**63 - 1
MAX_TOKENS = 2**63 - 1
_TOKEN_IDS = range(2**31)
MAX_LOGPROBS = 20
MAX_BIASES = 1024
MAX_ALLOWED = 1024
MAX_BAD_WORDS = 64
MAX_CHOICES = 128
MAX_FORMAT_BYTES = 64 << 10
MAX_TIMEOUT = 86400  # seconds


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one request is sampled; the defaults are greedy decoding of 128 tokens.

    Attributes:
        max_tokens: most tokens generated; exact under speculation.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_p: keep the smallest set of tokens whose probability reaches this, in (0, 1].
        top_k: keep the k most likely tokens; 0 keeps all (clients may say -1).
        min_p: drop tokens less likely than ``min_p`` times the most likely one, in [0, 1].
        seed: noise key; None lets the frontend draw one.
        ignore_eos: go on after an end-of-sequence token.
        stop: texts that end the answer; none of them is ever part of it.
        stop_token_ids: token ids that end the answer, besides the model's own.
        include_stop_str_in_output: keep the stop text, or the text of the stop token, at the end.
        skip_special_tokens: leave special tokens out of the text.
        min_tokens: no EOS, stop token or stop text before so many tokens of output.
        repetition_penalty: divides positive logits of tokens in prompt or output, multiplies
            negative ones (Keskar et al., arXiv 1909.05858); 1 is off.
        presence_penalty: taken once off the logits of tokens in the output, in [-2, 2].
        frequency_penalty: taken off them once per occurrence, in [-2, 2].
        logit_bias: token id -> what is added to its logit, in [-100, 100].
        allowed_token_ids: no other token is chosen, be it the end of a text; None = any may be.
        bad_words: texts that are not written, at the beginning of a word or as one after a space;
            told by their tokens, as vLLM does, so that other tokens may spell them.
        logprobs: None, or how many of the most likely tokens to report at each position (0..20),
            besides the one chosen. Of the model's own distribution: before logit bias, penalties,
            grammar and temperature.
        response_format: what the answer must look like, as OpenAI's ``response_format``:
            ``{"type": "text"}``, ``json_object``, ``json_schema`` (with ``json_schema.schema``),
            and ours, ``regex`` (with ``regex``), ``choice`` (with ``choice``, a list of texts) and
            ``grammar`` (with ``grammar``, in Lark's form).
        n: answers wanted; each has its own noise, derived from the seed.
        timeout: seconds after its arrival at which a request that has not ended fails (504),
            wherever it is; None = no limit.
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
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    n: int = 1
    timeout: float | None = None

    def validate(self) -> None:
        """Raise RequestError (400) naming the first field that is out of range."""

        def check(good: bool, field: str, message: str) -> None:
            if not good:
                raise RequestError(400, f"{message}, got {shown(getattr(self, field))}", field)

        check(self.max_tokens >= 1, "max_tokens", "must be at least 1")
        check(self.max_tokens <= MAX_TOKENS, "max_tokens", f"must be at most {MAX_TOKENS}")
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
        check(
            all(t in _TOKEN_IDS for t in self.stop_token_ids),
            "stop_token_ids",
            f"ids must be 0..{_TOKEN_IDS[-1]}",
        )
        check(
            0 <= self.min_tokens <= self.max_tokens,
            "min_tokens",
            f"must be between 0 and max_tokens = {self.max_tokens}",
        )
        check(
            math.isfinite(self.repetition_penalty) and 0 < self.repetition_penalty <= 100,
            "repetition_penalty",
            "must be in (0, 100]",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            check(-2 <= getattr(self, name) <= 2, name, "must be in [-2, 2]")
        check(
            self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
            "logprobs",
            f"must be 0..{MAX_LOGPROBS}",
        )
        check(1 <= self.n <= MAX_CHOICES, "n", f"must be 1..{MAX_CHOICES}")
        check(
            self.timeout is None or 0 < self.timeout <= MAX_TIMEOUT,
            "timeout",
            f"must be a positive number of seconds, at most {MAX_TIMEOUT}",
        )
        check(len(self.bad_words) <= MAX_BAD_WORDS, "bad_words", f"at most {MAX_BAD_WORDS} texts")
        check(
            all(word.strip() and len(word) <= 256 for word in self.bad_words),
            "bad_words",
            "each 1 to 256 characters, not only spaces",
        )
        self._validate_bias()
        self._validate_allowed()

    def _validate_allowed(self) -> None:
        allowed = self.allowed_token_ids
        if allowed is None:
            return
        if not 1 <= len(allowed) <= MAX_ALLOWED:
            reason = f"must be 1 to {MAX_ALLOWED} ids, got {len(allowed)}"
            raise RequestError(400, reason, "allowed_token_ids")
        if self.bad_words:  # or nothing might be left
            raise RequestError(400, "not together with bad_words", "allowed_token_ids")

    def _validate_bias(self) -> None:
        bias = self.logit_bias or {}
        if len(bias) > MAX_BIASES:
            raise RequestError(400, f"at most {MAX_BIASES} tokens, got {len(bias)}", "logit_bias")
        for token_id, value in bias.items():
            if token_id not in _TOKEN_IDS:
                reason = f"ids must be 0..{_TOKEN_IDS[-1]}, got {token_id}"
                raise RequestError(400, reason, "logit_bias")
            if not -100 <= value <= 100:
                reason = f"must be in [-100, 100], got {value!r} for {token_id}"
                raise RequestError(400, reason, "logit_bias")


def derived_seed(seed: int, index: int) -> int:
    """Seed of the ``index``-th of several answers to one request; the first has the request's."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & MAX_SEED


class Processors(msgspec.Struct, frozen=True, array_like=True):
    """What changes a request's logits before the temperature, as a function of its tokens.

    Attributes:
        prompt_len: tokens before the output; penalties and ``min_tokens`` count from there.
        repetition_penalty, presence_penalty, frequency_penalty: as in SamplingParams.
        logit_bias: (token id, bias) pairs, ids distinct.
        min_tokens: ``stop_ids`` are impossible until so many tokens of output exist.
        stop_ids: every id that ends the request.
        grammar: what the output must match, in llguidance's form; empty: anything.
        allowed: the only tokens that are possible; empty: all are.
        bad: sequences of tokens that the output must not hold.
    """

    prompt_len: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    grammar: str = ""
    allowed: tuple[int, ...] = ()
    bad: tuple[tuple[int, ...], ...] = ()

    @property
    def neutral(self) -> bool:
        """Whether no logit is ever changed."""
        plain = self.repetition_penalty == 1 and not (
            self.presence_penalty or self.frequency_penalty or self.logit_bias or self.grammar
        )
        held_back = self.min_tokens and self.stop_ids
        return plain and not (held_back or self.allowed or self.bad)

    @property
    def penalises(self) -> bool:
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)

    @property
    def wire_bytes(self) -> int:
        """About how much room it takes in a message, generously."""
        ids = len(self.stop_ids) + len(self.allowed) + sum(len(word) + 1 for word in self.bad)
        return 64 + len(self.grammar.encode()) + 16 * len(self.logit_bias) + 5 * ids


GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: float32 could not hold logits divided by them."""


class NoiseKey(msgspec.Struct, frozen=True, array_like=True):
    """What shapes one request's choice of token besides the logits; travels to target and draft.

    A temperature below GREEDY_BELOW is greedy. ``seed`` keys the noise. The other fields are as in
    SamplingParams. ``processors``: None where logits are taken as they are.
    """

    seed: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    processors: Processors | None = None

    @property
    def filtered(self) -> bool:
        """Whether some tokens are left out before one is drawn; nothing is of a greedy choice."""
        drawn = self.temperature >= GREEDY_BELOW
        return drawn and bool(self.top_p < 1 or self.top_k or self.min_p)
