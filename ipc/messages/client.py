"""The public protocol: what clients ask and what the frontend answers."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from ipc.messages.hub import ProcessState
from ipc.messages.sampling import SamplingParams

MAX_ID = 128  # characters of what a client calls a request

RequestId = Annotated[str, msgspec.Meta(max_length=MAX_ID)]

# ---------------------------------------------------------------- client -> frontend


class ChatMessage(msgspec.Struct, frozen=True):
    """One turn of a conversation."""

    role: str
    content: str


class Submit(msgspec.Struct, frozen=True, tag="submit", kw_only=True):
    """Start a request. Exactly one of ``prompt``, ``messages``, ``token_ids`` is given.

    ``id`` is chosen by the client, unique within its connection. ``chat_template_kwargs``: more
    variables of the chat template ``messages`` are rendered with. ``add_generation_prompt``: an
    answer begins after them; ``continue_final_message``: the last of them goes on, instead.
    ``must_fit``: fail (400) where ``max_tokens`` do not fit beside the prompt, rather than end
    there.
    """

    id: RequestId
    prompt: str | None = None
    messages: tuple[ChatMessage, ...] | None = None
    token_ids: tuple[int, ...] | None = None
    params: SamplingParams = SamplingParams()
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    must_fit: bool = False


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Stop a request; the answer is a Chunk whose finish_reason is "cancelled"."""

    id: RequestId


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Ask for state: ``what`` is "status" (answered by StatusReply)."""

    id: RequestId
    what: str = "status"


ClientMessage = Submit | Cancel | Ask

# ---------------------------------------------------------------- frontend -> client


class RequestMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Measured by the pipeline for one finished request.

    Times are seconds. ``decode_rate`` counts tokens after the first, per second after the first.
    ``drafts`` are the rounds that verified a chain; ``accepted_mean``, draft tokens accepted in one
    of these, and ``hit_rate`` are None without any. ``synthetic``: outcomes
    were replaced by replayed ones (``--synthetic-acceptance``), so these figures are no model's.
    """

    prompt_tokens: int
    output_tokens: int
    queue_time: float
    time_to_first_token: float
    total_time: float
    decode_rate: float
    rounds: int = 0
    drafts: int = 0
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

    ``thinking``, on an answer's first chunk: whether the prompt ended in ``<think>``, so that the
    answer begins with a thought (True), or the answer may begin with that mark itself (False);
    None where the model's chat template knows of no thoughts, or with a
    response format, to which the whole text belongs.

    ``prompt_tokens``: of the prompt, on an answer's first chunk; 0 on others.
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
    thinking: bool | None = None
    prompt_tokens: int = 0


class Failure(msgspec.Struct, frozen=True, tag="failure", kw_only=True):
    """The request (or the message, when ``id`` is empty) failed; see errors.RequestError."""

    id: str
    code: int
    message: str
    field: str = ""


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
