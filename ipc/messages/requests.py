"""Between frontend and scheduler: requests one way, their tokens the other."""

from __future__ import annotations

import msgspec

from ipc.messages.hub import ProcessState
from ipc.messages.sampling import NoiseKey
from ipc.messages.target import Logprobs

# ---------------------------------------------------------------- frontend -> scheduler


class AddRequest(msgspec.Struct, frozen=True, tag="add", array_like=True):
    """A validated, tokenized request. ``stop_ids`` holds every id that ends it (EOS included).

    ``logprobs``: most likely tokens to report at each position, -1 for no logprobs at all.
    """

    rid: int
    tokens: list[int]
    max_tokens: int
    key: NoiseKey
    stop_ids: list[int]
    arrived_ns: int
    logprobs: int = -1


class AbortRequest(msgspec.Struct, frozen=True, tag="abort", array_like=True):
    """Drop a request. ``reason`` "cancelled": nothing is answered. "stop" (a stop text was seen):
    answered by a last TokensOut without tokens, unless the request had finished before."""

    rid: int
    reason: str = "cancelled"


class StatsRequest(msgspec.Struct, frozen=True, tag="stats", array_like=True):
    """Ask for SchedulerStats; ``token`` comes back."""

    token: int


ToScheduler = AddRequest | AbortRequest | StatsRequest

# ---------------------------------------------------------------- scheduler -> frontend


class RequestStats(msgspec.Struct, frozen=True, array_like=True):
    """Totals of one request at its end; ``drafts`` are the rounds that had a chain."""

    scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    hits: int = 0
    misses: int = 0
    cached_prompt_tokens: int = 0
    drafts: int = 0


class TokensOut(msgspec.Struct, frozen=True, tag="tokens", array_like=True):
    """New tokens of one request, in order; ``finish`` is "", "stop" or "length".

    ``accepted`` of these came from the draft's chain of ``drafted`` tokens (they are the first
    ones); the next one, if there is one, is the recovery or bonus token. ``logprobs``: one per
    token, or none.
    """

    rid: int
    tokens: list[int]
    accepted: int
    finish: str = ""
    stats: RequestStats | None = None
    logprobs: list[Logprobs] = []
    drafted: int = 0


class Rejected(msgspec.Struct, frozen=True, tag="rejected", array_like=True):
    """The scheduler cannot serve a request; see errors.RequestError for ``code``."""

    rid: int
    code: int
    message: str
    field: str = ""


class SchedulerStats(msgspec.Struct, frozen=True, tag="stats", array_like=True):
    """Counters and gauges of the scheduler, by name; ``degraded`` as in StatusReply."""

    token: int
    values: dict[str, float]
    processes: list[ProcessState]
    degraded: str = ""


FromScheduler = TokensOut | Rejected | SchedulerStats
