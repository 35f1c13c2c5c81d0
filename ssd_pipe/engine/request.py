"""A request as the scheduler sees it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from ipc.messages.requests import AddRequest, RequestStats
from ipc.messages.sampling import NoiseKey
from ssd_pipe.engine.blocks import BlockTable
from ssd_pipe.engine.hashing import extend_all


class Status(enum.Enum):
    """WAITING has no slot and no blocks; RUNNING has both; FINISHED is gone from the scheduler."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(slots=True, eq=False)
class Request:
    """One request and its place in both models' memory.

    Attributes:
        tokens: prompt and committed output.
        prompt_len: how many of ``tokens`` are the prompt.
        computed: leading tokens whose target K/V is valid; the rest must be fed.
        limit: most tokens (prompt + output) this request may reach.
        prefix_hash: chained hash over ``tokens``, the cache's first key.
        chain: proposals for the coming verification.
        entry: speculation-cache entry the chain came from, -1 if none.
        sampled_chain: the chain was sampled by the draft, so its distributions judge it.
        after_miss: the last outcome was not in the cache.
        announced: leading blocks of ``table`` that the target has been told of.
        draft_length: committed tokens the draft has been told of, -1 before it knows the request.
        logprobs: most likely tokens to report at each position, -1 for no logprobs.
    """

    rid: int
    tokens: list[int]
    prompt_len: int
    limit: int
    key: NoiseKey
    stop_ids: frozenset[int]
    arrived_ns: int
    prefix_hash: int
    table: BlockTable
    status: Status = Status.WAITING
    slot: int = -1
    computed: int = 0
    chain: list[int] = field(default_factory=list)
    entry: int = -1
    sampled_chain: bool = False
    after_miss: bool = False
    announced: int = 0
    draft_length: int = -1
    scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    rounds: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    hits: int = 0
    misses: int = 0
    cached_prompt_tokens: int = 0
    logprobs: int = -1

    @classmethod
    def from_message(cls, message: AddRequest, hash0: int, table: BlockTable) -> Request:
        return cls(
            rid=message.rid,
            tokens=list(message.tokens),
            prompt_len=len(message.tokens),
            limit=len(message.tokens) + message.max_tokens,
            key=message.key,
            stop_ids=frozenset(message.stop_ids),
            arrived_ns=message.arrived_ns,
            prefix_hash=extend_all(hash0, message.tokens),
            table=table,
            logprobs=message.logprobs,
        )

    @property
    def prefilled(self) -> bool:
        """Only the newest token is still to be fed."""
        return self.computed == len(self.tokens) - 1 and len(self.tokens) > self.prompt_len

    @property
    def room(self) -> int:
        """Output tokens still allowed; at least 1 for a live request."""
        return self.limit - len(self.tokens)

    def drop_chain(self) -> None:
        self.chain = []
        self.entry = -1
        self.sampled_chain = False

    def stats(self) -> RequestStats:
        return RequestStats(
            scheduled_ns=self.scheduled_ns,
            first_token_ns=self.first_token_ns,
            last_token_ns=self.last_token_ns,
            rounds=self.rounds,
            drafted=self.drafted,
            accepted=self.accepted,
            hits=self.hits,
            misses=self.misses,
            cached_prompt_tokens=self.cached_prompt_tokens,
            drafts=self.drafts,
        )
