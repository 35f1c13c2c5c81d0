"""One request while the frontend serves it, and what is measured of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from ipc.messages.client import Alternative, Chunk, RequestMetrics, TokenLogprob
from ipc.messages.requests import RequestStats, TokensOut
from ipc.messages.target import Logprobs
from ssd_pipe.text.answer import AnswerText, Piece

NS = 1e-9


@dataclass(slots=True)
class OpenRequest:
    """State between AddRequest and the last chunk. Times are CLOCK_MONOTONIC ns.

    Attributes:
        client: ZeroMQ identity of who asked.
        id: what the client calls the request.
        rid: what the pipeline calls it.
        speculative: whether there is a draft. Its rounds are counted here too, for requests that
            end without statistics.
        synthetic: its outcomes are replayed ones.
        index: which of the answers to a Submit it is.
        thinking: as in Chunk; told once.
        stopped: a stop text has ended it; the scheduler's statistics are still to come.
    """

    client: bytes
    id: str
    rid: int
    answer: AnswerText
    prompt_tokens: int
    arrived_ns: int
    speculative: bool
    synthetic: bool = False
    output_tokens: int = 0
    first_ns: int = 0
    last_ns: int = 0
    rounds: int = 0
    drafts: int = 0
    accepted: int = 0
    stats: RequestStats | None = None
    index: int = 0
    thinking: bool | None = None
    stopped: bool = False

    def chunk(self, out: TokensOut, token_bytes: Callable[[int], bytes]) -> Chunk | None:
        """The chunk that ``out`` gives, None if it gives nothing to tell.

        When a stop text ends the answer before the scheduler does, ``stopped`` becomes true and the
        last chunk follows once the scheduler has ended it too. What it sent meanwhile is dropped.
        """
        if self.stopped:
            if not out.finish:
                return None
            self.stats = out.stats or self.stats
            return self._last("stop")
        self._observe(out)
        # The id that ends an answer belongs to it, its text only if it is asked for.
        silent = out.finish == "stop" and not self.answer.include_stop
        shown = out.tokens[:-1] if silent else out.tokens
        # In two parts, so that a client can tell the text of accepted tokens from what follows.
        lead = self.answer.push(shown[: out.accepted]) if out.accepted else Piece("", 0, False)
        piece = lead
        if not lead.stopped:
            rest = self.answer.push(shown[out.accepted :])
            piece = Piece(lead.text + rest.text, lead.used + rest.used, rest.stopped)
        text, finish, ids = piece.text, out.finish, tuple(out.tokens)
        if piece.stopped:
            ids = ids[: piece.used]
            self.stopped = not finish
            finish = "stop" if finish else ""
        elif finish:
            tail = self.answer.finish()
            text += tail.text
            finish = "stop" if tail.stopped else finish
        first = not self.output_tokens
        self.output_tokens += len(ids)
        return Chunk(
            id=self.id,
            text=text,
            token_ids=ids,
            finish_reason=finish or None,
            metrics=self.metrics() if finish else None,
            logprobs=tuple(
                public_logprob(token, logprobs, token_bytes)
                for token, logprobs in zip(ids, out.logprobs, strict=False)
            ),
            index=self.index,
            accepted=min(out.accepted, len(ids)),
            drafted=out.drafted,
            accepted_text=len(lead.text),
            thinking=self._told_thinking(),
            prompt_tokens=self.prompt_tokens if first else 0,
        )

    def cancelled(self) -> Chunk:
        """The last chunk of a cancelled request, with the text that was held back."""
        return self._last("cancelled", self.answer.finish().text)

    def _last(self, reason: str, text: str = "") -> Chunk:
        return Chunk(
            id=self.id,
            text=text,
            finish_reason=reason,
            metrics=self.metrics(),
            index=self.index,
        )

    def _told_thinking(self) -> bool | None:
        thinking, self.thinking = self.thinking, None
        return thinking

    def metrics(self) -> RequestMetrics:
        """Measured so far; ``queue_time`` counts until the scheduler took the request up."""
        now = time.monotonic_ns()
        stats = self.stats or RequestStats(
            rounds=self.rounds, drafts=self.drafts, accepted=self.accepted
        )
        first = self.first_ns or now
        scheduled = stats.scheduled_ns or first
        begun, ended = stats.first_token_ns or first, stats.last_token_ns or self.last_ns or now
        if self.stopped:  # what came after the stop text is not part of the answer
            ended = self.last_ns
        decoding = (ended - begun) * NS
        queries = stats.hits + stats.misses
        return RequestMetrics(
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            queue_time=max(0, scheduled - self.arrived_ns) * NS,
            time_to_first_token=(first - self.arrived_ns) * NS,
            total_time=(now - self.arrived_ns) * NS,
            decode_rate=(self.output_tokens - 1) / decoding
            if decoding > 0 and self.output_tokens > 1
            else 0.0,
            rounds=stats.rounds,
            drafts=stats.drafts,
            drafted_tokens=stats.drafted,
            accepted_tokens=stats.accepted,
            cache_hits=stats.hits,
            cache_misses=stats.misses,
            cached_prompt_tokens=stats.cached_prompt_tokens,
            accepted_mean=stats.accepted / stats.drafts if stats.drafts else None,
            hit_rate=stats.hits / queries if queries else None,
            synthetic=self.synthetic,
        )

    def _observe(self, out: TokensOut) -> None:
        self.last_ns = time.monotonic_ns()
        if not out.tokens:
            pass
        elif not self.first_ns:
            self.first_ns = self.last_ns
        elif self.speculative:
            self.rounds += 1
        self.drafts += bool(out.drafted)
        self.accepted += out.accepted
        self.stats = out.stats or self.stats


def public_logprob(
    token: int, logprobs: Logprobs, token_bytes: Callable[[int], bytes]
) -> TokenLogprob:
    """The scheduler's figures of one token, with the tokens' texts."""
    top = zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
    return TokenLogprob(
        token,
        logprobs.logprob,
        logprobs.rank,
        token_bytes(token),
        tuple(Alternative(other, value, token_bytes(other)) for other, value in top),
    )
