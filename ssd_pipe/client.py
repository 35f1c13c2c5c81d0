"""Blocking client of a running pipeline; the asyncio one is in ``async_client``."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from ipc.messages.client import Chunk, StatusReply
from ssd_pipe.async_client import AsyncClient, AsyncStream, Result
from ssd_pipe.errors import PeerLost
from ssd_pipe.params import SamplingParams
from ssd_pipe.submission import Messages, Prompt

__all__ = ["AsyncClient", "AsyncStream", "Client", "Result", "Stream"]

T = TypeVar("T")


class Stream:
    """Chunks of one request as they come; leaving it early cancels the request.

    An iterator and context manager. Iterating raises RequestError if the pipeline refuses the
    request, PeerLost if the pipeline goes away.

    Attributes:
        id: what the request is called on this connection.
    """

    def __init__(self, client: Client, stream: AsyncStream) -> None:
        self.id = stream.id
        self._client = client
        self._stream = stream
        self._taken = 0  # chunks that the caller has
        self._read_so_far = 0
        self._newest: Chunk | None = None
        self._reading: asyncio.Task[Chunk | None] | None = None

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        chunk = self._client._call(self._read(self._taken))
        self._taken += 1
        if chunk is None:
            raise StopIteration
        return chunk

    def cancel(self) -> None:
        """Ask for the end; the last chunk then says "cancelled"."""
        self._client._call(self._stream.cancel())

    def close(self) -> None:
        """Cancel if the last chunk has not been read; idempotent."""
        self._client._call(self._close())

    def result(self) -> Result:
        """Wait for the end and put the chunks together."""
        return self._client._call(self._stream.result())

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    async def _read(self, number: int) -> Chunk | None:
        """Chunk ``number``, from 0 on; None after the last. An interrupt can leave this behind with
        nobody who waits for it: what it gets is kept for whoever asks again."""
        if number < self._read_so_far:
            return self._newest
        if self._reading is None:
            self._reading = asyncio.create_task(self._next())
        reading = self._reading
        chunk = await asyncio.shield(reading)
        if self._reading is reading:
            self._reading, self._newest = None, chunk
            self._read_so_far += 1
        return chunk

    async def _next(self) -> Chunk | None:
        return await anext(self._stream, None)

    async def _close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        await self._stream.aclose()


class Client:
    """Connection to a pipeline; any number of requests at once, from any threads.

    Arguments, errors and the meaning of ``timeout`` are AsyncClient's. A context manager.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        run: str | None = None,
        timeout: float = 30.0,
        shm_dir: str = "",
        server_key: str = "",
        client_key: str = "",
    ) -> None:
        self._client = AsyncClient(endpoint, run, timeout, shm_dir, server_key, client_key)
        self.endpoint = self._client.endpoint
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="ssd-client", daemon=True)
        self._thread.start()

    def stream(
        self,
        prompt: Prompt | None = None,
        params: SamplingParams | None = None,
        *,
        messages: Messages | None = None,
        token_ids: Sequence[int] | None = None,
        **sampling: Any,
    ) -> Stream:
        """Submit at once; returns the stream of its chunks. See AsyncClient.stream."""

        async def submit() -> AsyncStream:
            return self._client.stream(
                prompt, params, messages=messages, token_ids=token_ids, **sampling
            )

        return Stream(self, self._call(submit()))

    def chat(
        self, messages: str | Messages, params: SamplingParams | None = None, **sampling: Any
    ) -> Stream:
        """Stream the answer to a conversation, or to one user message given as a string."""

        async def submit() -> AsyncStream:
            return self._client.chat(messages, params, **sampling)

        return Stream(self, self._call(submit()))

    def generate(
        self,
        prompt: Prompt | None = None,
        params: SamplingParams | None = None,
        *,
        messages: Messages | None = None,
        token_ids: Sequence[int] | None = None,
        **sampling: Any,
    ) -> Result:
        """The whole answer; arguments as for ``stream``. An interrupt cancels the request."""
        return self._call(
            self._client.generate(
                prompt, params, messages=messages, token_ids=token_ids, **sampling
            )
        )

    def cancel(self, request_id: str) -> None:
        """Ask the pipeline to end a request of this client; unknown ids are ignored."""
        self._call(self._client.cancel(request_id))

    def status(self) -> StatusReply:
        """State and counters of the pipeline. Raises PeerLost if it does not answer in time."""
        return self._call(self._client.status())

    def close(self) -> None:
        """Cancel what is open and disconnect; idempotent."""
        if self._loop.is_closed():
            return
        self._call(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` on the client's thread; whatever interrupts the wait cancels it."""
        if self._loop.is_closed():
            work.close()
            raise PeerLost("the client is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise
