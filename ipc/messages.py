"""Every struct that crosses a process boundary. Imports no torch.

Three families: *public* (client <-> frontend), *control* (between processes, over ZeroMQ) and
*hot* (once a round, over shared memory). All are MessagePack through msgspec; nothing is pickled.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from ssd_pipe.params import NoiseKey, SamplingParams

TOKEN_BYTES = 5  # of a token id in MessagePack, at most
MAX_ID = 128  # characters of what a client calls a request

RequestId = Annotated[str, msgspec.Meta(max_length=MAX_ID)]

# ---------------------------------------------------------------- public: client -> frontend


class ChatMessage(msgspec.Struct, frozen=True):
    """One turn of a conversation."""

    role: str
    content: str


class Submit(msgspec.Struct, frozen=True, tag="submit", kw_only=True):
    """Start a request. Exactly one of ``prompt``, ``messages``, ``token_ids`` is given.

    ``id`` is chosen by the client, unique within its connection.
    """

    id: RequestId
    prompt: str | None = None
    messages: tuple[ChatMessage, ...] | None = None
    token_ids: tuple[int, ...] | None = None
    params: SamplingParams = SamplingParams()


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Stop a request; the answer is a Chunk whose finish_reason is "cancelled"."""

    id: RequestId


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Ask for state: ``what`` is "status" (answered by StatusReply)."""

    id: RequestId
    what: str = "status"


ClientMessage = Submit | Cancel | Ask

# ---------------------------------------------------------------- public: frontend -> client


class RequestMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Measured by the pipeline for one finished request.

    Times are seconds. ``decode_rate`` counts tokens after the first, per second after the first.
    ``hit_rate`` and ``accepted_mean`` are None without speculation rounds. ``synthetic``: outcomes
    were replaced by replayed ones (``--synthetic-acceptance``), so these figures are no model's.
    """

    prompt_tokens: int
    output_tokens: int
    queue_time: float
    time_to_first_token: float
    total_time: float
    decode_rate: float
    rounds: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    cached_prompt_tokens: int = 0
    accepted_mean: float | None = None
    hit_rate: float | None = None
    synthetic: bool = False


class Alternative(msgspec.Struct, frozen=True, array_like=True):
    """A token that could have been chosen. ``data``: its UTF-8 text, maybe part of a character."""

    token_id: int
    logprob: float
    data: bytes


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """A chosen token's natural-log probability under the target's unmodified distribution.

    ``rank`` is 1 for the most likely token; ``top`` are the most likely ones, best first.
    """

    token_id: int
    logprob: float
    rank: int
    data: bytes
    top: tuple[Alternative, ...] = ()


class Chunk(msgspec.Struct, frozen=True, tag="chunk", kw_only=True):
    """New text of one answer. Texts of an ``index`` concatenate to the decoded answer.

    ``finish_reason`` is set on an answer's last chunk: "stop", "length", or "cancelled".
    ``logprobs``, where asked for, has one entry per token id. ``index`` numbers the answers of a
    request with n > 1.

    How the ids came about: the first ``accepted`` are the draft's, out of a chain of ``drafted``;
    the one after them, if there is one, is the recovery token, or the bonus token when the whole
    chain was accepted. With ``drafted`` 0 nothing was speculated. ``accepted_text`` is the number
    of leading characters of the text that accepted ids gave; a character that several ids make up
    is of the last of them.
    """

    id: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    metrics: RequestMetrics | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    index: int = 0
    accepted: int = 0
    drafted: int = 0
    accepted_text: int = 0


class Failure(msgspec.Struct, frozen=True, tag="failure", kw_only=True):
    """The request (or the message, when ``id`` is empty) failed; see errors.RequestError."""

    id: str
    code: int
    message: str
    field: str = ""


class ProcessState(msgspec.Struct, frozen=True, kw_only=True):
    """One process as last seen: state is "starting", "ready", "stopping", "dead".

    ``port``: TCP port it takes HTTP requests on, 0 if none. ``silent``: seconds since its last
    heartbeat; the hub's own is 0. ``notes``: what else there is to know, such as its device and
    the transport it uses.
    """

    name: str
    pid: int
    state: str
    detail: str = ""
    port: int = 0
    silent: float = 0.0
    notes: dict[str, str] = {}


class StatusReply(msgspec.Struct, frozen=True, tag="status", kw_only=True):
    """Answer to Ask("status").

    ``synthetic``: the replayed acceptance in use, empty if outcomes are real.
    ``age``: seconds since the scheduler told what is said here of running and waiting requests,
    processes and its counters; -1 if it has not yet. ``degraded``: what it serves without and why,
    empty while the pipeline is whole.
    """

    id: str
    run: str
    mode: str
    target: str
    draft: str
    max_model_len: int
    running: int
    waiting: int
    processes: tuple[ProcessState, ...] = ()
    counters: dict[str, float] = {}
    age: float = -1.0
    degraded: str = ""
    synthetic: str = ""


ServerMessage = Chunk | Failure | StatusReply

# ---------------------------------------------------------------- control: hub handshake


class Hello(msgspec.Struct, frozen=True, tag="hello", kw_only=True):
    """First message of a process to the hub (the scheduler), before it loads anything.

    ``config_digest`` must equal the hub's, or the hub answers Refused.
    """

    name: str
    pid: int
    config_digest: str


class Ready(msgspec.Struct, frozen=True, tag="ready", kw_only=True):
    """A process finished loading. ``facts`` are role-specific numbers the hub needs.

    target: num_blocks, max_model_len, vocab_size; draft: num_blocks, vocab_size; gateway: port.
    ``notes`` are as in ProcessState.
    """

    name: str
    facts: dict[str, int] = {}
    notes: dict[str, str] = {}


class Failed(msgspec.Struct, frozen=True, tag="failed", kw_only=True):
    """A process cannot go on; ``message`` is one line for the user."""

    name: str
    message: str


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """Heartbeat, both ways."""

    name: str


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The hub will not have this process; ``message`` says why."""

    message: str


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The hub's answer to Hello. ``transport`` ("shm" or "zmq") is what hot channels use.

    ``returning``: the group serves already, and this process takes the place of one that is gone;
    what processes agree on while they start has been agreed on.
    """

    run: str
    transport: str = "shm"
    returning: bool = False


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Leave now, in order. ``reason`` is logged."""

    reason: str


class GroupReady(msgspec.Struct, frozen=True, tag="group_ready"):
    """Hub to all: every process is ready."""

    facts: dict[str, int] = {}


PeerMessage = Hello | Ready | Failed | Beat
HubMessage = Welcome | Refused | Beat | Shutdown | GroupReady

# ---------------------------------------------------------------- control: frontend <-> scheduler


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


class RequestStats(msgspec.Struct, frozen=True, array_like=True):
    """Totals of one request at its end."""

    scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    hits: int = 0
    misses: int = 0
    cached_prompt_tokens: int = 0


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probability and rank of a chosen token, and the most likely tokens with theirs."""

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


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

# ---------------------------------------------------------------- hot: scheduler -> target


class SeqStart(msgspec.Struct, frozen=True, array_like=True):
    """A sequence takes ``slot``; its block table there starts empty.

    ``tokens``: those whose K/V the prefix cache had, where ``key.processors`` look at tokens; no
    row brings them. ``logprobs``: as in AddRequest.
    """

    rid: int
    slot: int
    key: NoiseKey
    tokens: list[int] = []
    logprobs: int = -1


class StepRow(msgspec.Struct, frozen=True, array_like=True):
    """One sequence's part of a target step.

    ``tokens`` are fed at positions start.. ; the last ``chain`` of them are proposals under
    verification. ``sample`` is False for a prompt chunk that is not the last. ``blocks`` are
    appended to the slot's block table first. ``handover`` > 0 numbers the draft distributions
    that judge the chain (rejection rule); 0 means the chain is deterministic (a point mass).
    """

    slot: int
    start: int
    tokens: list[int]
    chain: int
    sample: bool
    blocks: list[int]
    handover: int = 0


class RowLease(msgspec.Struct, frozen=True, array_like=True):
    """What the GPU needs to follow one row by itself.

    ``prefix_hash`` covers every committed token, ``left`` output tokens are still allowed, and any
    of ``stop_ids`` ends the row. ``draws``: replayed outcomes, accepted * 2 + hit, one a round.
    """

    prefix_hash: int
    left: int
    stop_ids: list[int] = []
    draws: list[int] = []


class Lease(msgspec.Struct, frozen=True, array_like=True):
    """Leave to run ``rounds`` rounds, numbered from ``first``, without the scheduler.

    The plan's rows are the leased ones. ``waits``: bit d says that a cached chain of d tokens waits
    for its next one. ``patience_us``: the longest that any row waits for its cached chain, and for
    a backup.
    """

    first: int
    rounds: int
    waits: int
    patience_us: int
    backup_patience_us: int
    rows: list[RowLease]


class StepPlan(msgspec.Struct, frozen=True, tag="plan", array_like=True):
    """One target step, or a lease's first; ``drop`` frees slots before ``begin`` fills them.

    ``alone``: the draft does nothing meanwhile, so the target may have its cores.
    """

    step: int
    rows: list[StepRow]
    begin: list[SeqStart] = []
    drop: list[int] = []
    lease: Lease | None = None
    alone: bool = False


class RowOutcome(msgspec.Struct, frozen=True, array_like=True):
    """Outcome (k, t*) of one sampled row, in the order of the plan's sampled rows.

    ``logprobs``, where asked for, are those of the k accepted tokens and of t*. ``failure``, if not
    empty, says why the row's request cannot go on; nothing was chosen then.
    """

    accepted: int
    token: int
    logprobs: list[Logprobs] = []
    failure: str = ""


class StepResult(msgspec.Struct, frozen=True, tag="result", array_like=True):
    """What a target step gave. Times are CLOCK_MONOTONIC ns: received, forward done, sampled.

    At the end of a lease ``rounds`` is how many of its rounds ran; their outcomes are in the
    records.
    """

    step: int
    outcomes: list[RowOutcome]
    started_ns: int
    forward_ns: int
    finished_ns: int
    rounds: int = 0


# ---------------------------------------------------------------- hot: scheduler -> draft


class DraftStart(msgspec.Struct, frozen=True, array_like=True):
    """A sequence takes a draft ``slot`` with its committed ``tokens``."""

    rid: int
    slot: int
    key: NoiseKey
    tokens: list[int]


class DraftRow(msgspec.Struct, frozen=True, array_like=True):
    """One sequence's part of a draft round.

    ``tokens`` extend the committed tokens, which number ``length`` before. ``chain`` is what the
    target verifies now; ``entry`` is the cache entry it came from, -1 if from elsewhere. With
    ``backup`` > 0 the outcome was a miss: speculate a chain of that many tokens just in time,
    answer ChainReady, and take it as this row's chain. ``fork``: speculate on the outcomes of
    verifying that chain, at most k tokens each. ``prefix_hash`` covers every committed
    token, ``tokens`` included. ``after_miss`` picks the fan-out. ``handover`` > 0 numbers the hand
    over of the chain's draft distributions (rejection rule).
    """

    slot: int
    length: int
    tokens: list[int]
    chain: list[int]
    fork: bool
    prefix_hash: int
    entry: int = -1
    backup: int = 0
    after_miss: bool = False
    handover: int = 0


class DraftLease(msgspec.Struct, frozen=True, array_like=True):
    """Rounds ``first`` .. ``first + rounds - 1`` run without plans: the draft follows the records.

    ``backup``: tokens to draft just in time for a miss, 0 = look up n-grams, -1 = nothing;
    ``always`` also when other rows of the round hit, which then wait for it.
    """

    first: int
    rounds: int
    backup: int
    always: bool = False

    def drafts(self, missed: int, rows: int) -> bool:
        """Whether so many misses among so many rows are backed up by drafting."""
        return self.backup > 0 and (self.always or missed == rows)


class DraftPlan(msgspec.Struct, frozen=True, tag="draft", array_like=True):
    """One draft round; it replaces whatever branches the draft is still working on.

    ``fresh``: forget every sequence first. A draft that has just started waits for such a plan:
    what it finds before it was meant for its predecessor. It is always answered by DraftTimes.
    With a ``lease``, its branches are for the outcomes of round ``lease.first``, and the rows are
    the leased ones in order. Records up to round ``read`` come before the plan.
    ``number`` > 0: the leased round this plan is for; plans made from records have one too.

    Branches get at most ``k`` tokens each, and a row at most ``branches`` of them; 0 = as many as
    configured. Where there is nothing but backups to make, the target waits for all of it, and the
    draft may have its cores.
    """

    round: int
    rows: list[DraftRow]
    begin: list[DraftStart] = []
    drop: list[int] = []
    fresh: bool = False
    lease: DraftLease | None = None
    read: int = 0
    number: int = 0
    k: int = 0
    branches: int = 0


# ---------------------------------------------------------------- hot: draft -> scheduler


class ChainReady(msgspec.Struct, frozen=True, tag="chain", array_like=True):
    """Answer to a DraftRow with ``backup``; empty ``tokens`` if the draft cannot speculate now."""

    round: int
    slot: int
    tokens: list[int]


class DraftTimes(msgspec.Struct, frozen=True, tag="times", array_like=True):
    """Stage times of one draft round, CLOCK_MONOTONIC ns; ``steps`` are tree steps done.

    ``free_blocks``: KV blocks for trunks that are free after it.
    """

    round: int
    started_ns: int
    backup_ns: int
    glue_ns: int
    tree_ns: int
    finished_ns: int
    steps: int
    branches: int
    free_blocks: int


class DepthReady(msgspec.Struct, frozen=True, tag="depth", array_like=True):
    """One more token of every living branch is in the cache; sent when the scheduler waits."""

    round: int
    depth: int


DraftNotice = ChainReady | DraftTimes | DepthReady
