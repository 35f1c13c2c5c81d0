"""The answer to one request, as the client's user sees it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ipc.messages.client import Cancel, Chunk, RequestMetrics, ServerMessage, TokenLogprob
from ssd_pipe.errors import PeerLost, SsdPipeError

if TYPE_CHECKING:
    from ssd_pipe.async_client import AsyncClient


_COUNTS = (
    "output_tokens",
    "rounds",
    "drafts",
    "drafted_tokens",
    "accepted_tokens",
    "cache_hits",
    "cache_misses",
)


@dataclass(frozen=True, slots=True)
class Result:
    """A finished answer; see Chunk for ``finish_reason`` and ``logprobs``.

    ``choices``: with n > 1, all answers. The result is then the first of them, with metrics that
    count the tokens and rounds of all.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    metrics: RequestMetrics | None
    logprobs: tuple[TokenLogprob, ...] = ()
    choices: tuple[Result, ...] = ()


class AsyncStream:
    """Chunks of one request as they come; leaving it early cancels the request.

    An async iterator and context manager. Iterating raises RequestError if the pipeline refuses
    the request, PeerLost if the pipeline goes away.

    Attributes:
        id: what the request is called on this connection.
    """

    def __init__(
        self,
        client: AsyncClient,
        request_id: str,
        queue: asyncio.Queue[ServerMessage | SsdPipeError],
        answers: int = 1,
    ) -> None:
        self.id = request_id
        self._answers = self._open_answers = answers
        self._client = client
        self._queue = queue
        self._done = False

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        if self._done:
            raise StopAsyncIteration
        item = await self._queue.get()
        if isinstance(item, SsdPipeError):
            self._end()
            raise item
        if not isinstance(item, Chunk):
            raise PeerLost(f"the pipeline answered a request with {type(item).__name__}")
        if item.finish_reason is not None:
            self._open_answers -= 1
            if not self._open_answers:
                self._end()
        return item

    async def cancel(self) -> None:
        """Ask for the end; the last chunk then says "cancelled"."""
        await self._client.cancel(self.id)

    async def aclose(self) -> None:
        """Cancel if the last chunk has not been read; idempotent."""
        if not self._done:
            self._end()
            self._client.try_send(Cancel(self.id))

    async def result(self) -> Result:
        """Wait for the end and put the chunks together."""
        parts: list[list[Chunk]] = [[] for _ in range(self._answers)]
        async for chunk in self:
            parts[chunk.index].append(chunk)
        choices = tuple(_joined(chunks) for chunks in parts)
        if len(choices) == 1:
            return choices[0]
        metrics = _summed([choice.metrics for choice in choices if choice.metrics is not None])
        return replace(choices[0], metrics=metrics, choices=choices)

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if not self._done:
            self._client.abandon(self.id)

    def _end(self) -> None:
        self._done = True
        self._client.forget(self.id)


def _joined(chunks: list[Chunk]) -> Result:
    return Result(
        "".join(chunk.text for chunk in chunks),
        tuple(token for chunk in chunks for token in chunk.token_ids),
        (chunks[-1].finish_reason or "") if chunks else "",
        chunks[-1].metrics if chunks else None,
        tuple(entry for chunk in chunks for entry in chunk.logprobs),
    )


def _summed(metrics: list[RequestMetrics]) -> RequestMetrics | None:
    """Of several answers to one prompt: counts add up, times are those of the slowest."""
    if not metrics:
        return None

    def total(name: str) -> int:
        return sum(getattr(m, name) for m in metrics)

    counts = {name: total(name) for name in _COUNTS}
    queries = counts["cache_hits"] + counts["cache_misses"]
    return RequestMetrics(
        prompt_tokens=metrics[0].prompt_tokens,
        cached_prompt_tokens=metrics[0].cached_prompt_tokens,
        queue_time=max(m.queue_time for m in metrics),
        time_to_first_token=min(m.time_to_first_token for m in metrics),
        total_time=max(m.total_time for m in metrics),
        decode_rate=sum(m.decode_rate for m in metrics),
        accepted_mean=counts["accepted_tokens"] / counts["drafts"] if counts["drafts"] else None,
        hit_rate=counts["cache_hits"] / queries if queries else None,
        synthetic=any(m.synthetic for m in metrics),
        **counts,
    )
