"""One request while the frontend serves it, and what is measured of it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ipc.messages import Chunk, RequestMetrics, RequestStats, TokensOut
from ssd_pipe.text.answer import AnswerText

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
    """

    client: bytes
    id: str
    rid: int
    answer: AnswerText
    prompt_tokens: int
    arrived_ns: int
    speculative: bool
    output_tokens: int = 0
    first_ns: int = 0
    last_ns: int = 0
    rounds: int = 0
    accepted: int = 0
    stats: RequestStats | None = None

    def chunk(self, out: TokensOut) -> tuple[Chunk, bool]:
        """The chunk that ``out`` gives, and whether a stop text ended it before the scheduler."""
        self._observe(out)
        ended_by_id = out.finish == "stop"
        # The id that ends an answer belongs to it, its text does not.
        piece = self.answer.push(out.tokens[:-1] if ended_by_id else out.tokens)
        text, finish, ids = piece.text, out.finish, tuple(out.tokens)
        if piece.stopped:
            finish, ids = "stop", ids[: piece.used]
        elif finish:
            rest = self.answer.finish()
            text += rest.text
            finish = "stop" if rest.stopped else finish
        self.output_tokens += len(ids)
        chunk = Chunk(
            id=self.id,
            text=text,
            token_ids=ids,
            finish_reason=finish or None,
            metrics=self.metrics() if finish else None,
        )
        return chunk, piece.stopped and not out.finish

    def cancelled(self) -> Chunk:
        """The last chunk of a cancelled request, with the text that was held back."""
        return Chunk(
            id=self.id,
            text=self.answer.finish().text,
            finish_reason="cancelled",
            metrics=self.metrics(),
        )

    def metrics(self) -> RequestMetrics:
        """Measured so far; ``queue_time`` counts until the scheduler took the request up."""
        now = time.monotonic_ns()
        stats = self.stats or RequestStats(rounds=self.rounds, accepted=self.accepted)
        first = self.first_ns or now
        scheduled = stats.scheduled_ns or first
        begun, ended = stats.first_token_ns or first, stats.last_token_ns or self.last_ns or now
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
            drafted_tokens=stats.drafted,
            accepted_tokens=stats.accepted,
            cache_hits=stats.hits,
            cache_misses=stats.misses,
            cached_prompt_tokens=stats.cached_prompt_tokens,
            accepted_mean=stats.accepted / stats.rounds
            if stats.rounds and self.speculative
            else None,
            hit_rate=stats.hits / queries if queries else None,
        )

    def _observe(self, out: TokensOut) -> None:
        self.last_ns = time.monotonic_ns()
        if not out.tokens:
            pass
        elif not self.first_ns:
            self.first_ns = self.last_ns
        elif self.speculative:
            self.rounds += 1
        self.accepted += out.accepted
        self.stats = out.stats or self.stats
