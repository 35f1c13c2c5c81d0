"""The answer to one request, as the client's user sees it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ipc.messages import Cancel, Chunk, RequestMetrics, ServerMessage
from ssd_pipe.errors import PeerLost, SsdPipeError

if TYPE_CHECKING:
    from ssd_pipe.async_client import AsyncClient


@dataclass(frozen=True, slots=True)
class Result:
    """A finished answer; see Chunk for ``finish_reason``."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    metrics: RequestMetrics | None


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
    ) -> None:
        self.id = request_id
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
        texts: list[str] = []
        ids: list[int] = []
        async for chunk in self:
            texts.append(chunk.text)
            ids += chunk.token_ids
        return Result("".join(texts), tuple(ids), chunk.finish_reason or "", chunk.metrics)

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
