"""asyncio client of a running pipeline, on its public ZeroMQ endpoint. Imports no torch."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from ipc import sockets
from ipc.messages.client import (
    Ask,
    Cancel,
    ChatMessage,
    ClientMessage,
    Failure,
    ServerMessage,
    StatusReply,
    Submit,
)
from ipc.running_time import RunningTime
from ssd_pipe import submission
from ssd_pipe.async_stream import AsyncStream, Result
from ssd_pipe.endpoint import CLIENT_KEY, SERVER_KEY, find_endpoint, find_keys
from ssd_pipe.errors import PeerLost, RequestError, ResourceError, SsdPipeError
from ssd_pipe.params import SamplingParams
from ssd_pipe.submission import Messages, Prompt

CONNECT_TIMEOUT = 5.0  # seconds
LINK_SILENCE_MS = 30_000
_LINK_EVENTS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class AsyncClient:
    """Connection to a pipeline; any number of requests at once. To be used on one event loop.

    Args:
        endpoint: public address; None = find it (see ``endpoint.find_endpoint``).
        run: name of the run to talk to, if there is no ``endpoint``.
        timeout: seconds of silence, questions unanswered, after which waiting requests fail
            with PeerLost.
        shm_dir: where run directories are, if not in /dev/shm.
        server_key: the pipeline's public key, if it asks for CURVE keys: a certificate, or the key
            itself. Empty = $SSD_SERVER_KEY.
        client_key: this client's secret certificate. Empty = $SSD_CLIENT_KEY, or a fresh pair,
            which a pipeline that knows its clients refuses.

    Raises ResourceError if no pipeline is found, or a key is missing or not usable.
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
        self.endpoint = find_endpoint(endpoint, run, shm_dir)
        self._keys = find_keys(self.endpoint, server_key, client_key)
        self._timeout = timeout
        self._period = min(1.0, timeout / 4)
        self._numbers = itertools.count(1)
        self._queues: dict[str, asyncio.Queue[ServerMessage | SsdPipeError]] = {}
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ServerMessage] = msgspec.msgpack.Decoder(
            ServerMessage
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._spoken = False  # the pipeline, since ``_watch_silence`` last looked
        self._closed = False

    # ------------------------------------------------------------ requests

    def stream(
        self,
        prompt: Prompt | None = None,
        params: SamplingParams | None = None,
        *,
        messages: Messages | None = None,
        token_ids: Sequence[int] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        must_fit: bool = False,
        **sampling: Any,
    ) -> AsyncStream:
        """Submit at once; returns the stream of its chunks.

        Exactly one of ``prompt`` (a text or token ids, see ``submission.Prompt``), ``messages`` and
        ``token_ids``. ``chat_template_kwargs`` are more variables of the model's chat template
        (``{"enable_thinking": False}``). ``add_generation_prompt`` has an answer begin after the
        messages; without it, ``continue_final_message`` has the last of them go on. With
        ``must_fit``, ``max_tokens`` that do not fit beside the prompt are refused; else the answer
        ends where the context does. ``sampling`` are fields of SamplingParams and override
        ``params``. Raises RequestError for a request that is too long, has a part of another type
        or out of range, or text that is not Unicode (surrogates).
        """
        text, ids = submission.text_and_ids(prompt)
        if ids is not None:
            if token_ids is not None:
                raise RequestError(
                    400, "exactly one of prompt and token_ids, got both", "token_ids"
                )
            token_ids = ids
        submit = Submit(
            id=f"r{next(self._numbers)}",
            prompt=text,
            messages=submission.chat_messages(messages),
            token_ids=submission.token_ids(token_ids),
            params=submission.sampling(params, sampling),
            chat_template_kwargs=chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            must_fit=must_fit,
        )
        data = submission.encode(submit)
        self._open()
        stream = AsyncStream(self, submit.id, self.register(submit.id), submit.params.n)
        self._spawn(self._deliver(submit.id, data))
        return stream

    def chat(
        self, messages: str | Messages, params: SamplingParams | None = None, **sampling: Any
    ) -> AsyncStream:
        """Stream the answer to a conversation, or to one user message given as a string."""
        if isinstance(messages, str):
            messages = [ChatMessage("user", messages)]
        return self.stream(params=params, messages=messages, **sampling)

    async def generate(
        self,
        prompt: Prompt | None = None,
        params: SamplingParams | None = None,
        *,
        messages: Messages | None = None,
        token_ids: Sequence[int] | None = None,
        **sampling: Any,
    ) -> Result:
        """The whole answer; arguments as for ``stream``. Cancelling the task cancels it."""
        async with self.stream(
            prompt, params, messages=messages, token_ids=token_ids, **sampling
        ) as stream:
            return await stream.result()

    async def cancel(self, request_id: str) -> None:
        """Ask the pipeline to end a request of this client; unknown ids are ignored."""
        self._open()
        self.try_send(Cancel(request_id))

    async def status(self) -> StatusReply:
        """State and counters of the pipeline. Raises PeerLost if it does not answer in time."""
        self._open()
        ask = Ask(f"a{next(self._numbers)}")
        queue = self.register(ask.id)
        try:
            await self._deliver(ask.id, self._encoder.encode(ask))
            reply = await queue.get()
        finally:
            self.forget(ask.id)
        if isinstance(reply, SsdPipeError):
            raise reply
        if not isinstance(reply, StatusReply):
            raise PeerLost(f"the pipeline answered a question with {type(reply).__name__}")
        return reply

    async def close(self, error: SsdPipeError | None = None) -> None:
        """Cancel what is open, which fails with ``error``, and disconnect; idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._loop is None:
            return
        for request_id in list(self._queues):
            self.try_send(Cancel(request_id))
        self._fail_all(error or PeerLost("the client was closed"))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        sockets.unwatch(self._socket, self._monitor)
        self._socket.close()

    async def __aenter__(self) -> AsyncClient:
        self._open()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    # ------------------------------------------------------------ connection

    def _open(self) -> None:
        """Connect on first use, on the event loop that then owns the socket."""
        if self._closed:
            raise PeerLost("the client is closed")
        if self._loop is not None:
            return
        self._socket = sockets.make_async(zmq.DEALER, hwm=0, linger_ms=500)
        # Only a connection that stands takes messages: none goes to another pipeline later.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
        # The pipeline notices a dead client; longer than a machine may stand still.
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, LINK_SILENCE_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TTL, LINK_SILENCE_MS)
        self._monitor = sockets.watch_async(self._socket, _LINK_EVENTS)
        try:
            sockets.connect_also(self._socket, self.endpoint, self._keys)
        except ResourceError:
            sockets.unwatch(self._socket, self._monitor)
            self._socket.close(0)
            raise
        self._loop = asyncio.get_running_loop()
        for work in (self._read(), self._watch_link(), self._watch_silence()):
            self._spawn(work)

    async def _read(self) -> None:
        while True:
            data = await self._socket.recv()
            self._spoken = True
            try:
                message = self._decoder.decode(data)
            except msgspec.MsgspecError as error:
                self._fail_all(PeerLost(f"unreadable answer from {self.endpoint}: {error}"))
                continue
            queue = self._queues.get(message.id)
            if queue is not None:
                queue.put_nowait(_as_error(message) if isinstance(message, Failure) else message)

    async def _watch_link(self) -> None:
        while True:
            event = parse_monitor_message(await self._monitor.recv_multipart())["event"]
            if event != zmq.EVENT_DISCONNECTED:
                self._fail_all(self._refused(event))
                continue
            while await self._socket.poll(0):  # answers that came before the end still count
                await asyncio.sleep(0)
            self._fail_all(PeerLost(f"the pipeline at {self.endpoint} has gone"))

    def _refused(self, event: int) -> SsdPipeError:
        """What the failure of a handshake means."""
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            reason = f"does not know this client; its key is ${CLIENT_KEY} or client_key"
        elif self._keys is None:
            reason = f"asks for keys (${SERVER_KEY} or server_key), or is none"
        else:
            reason = f"has another key than ${SERVER_KEY} or server_key says, or none"
        return RequestError(401, f"the pipeline at {self.endpoint} {reason}")

    async def _watch_silence(self) -> None:
        """While somebody waits: ask when it is quiet, give up after ``timeout``."""
        clock = RunningTime(self._period)
        heard = 0.0
        while True:
            await asyncio.sleep(self._period)
            now = clock.read()
            if self._spoken:
                heard, self._spoken = now, False
            silent = now - heard
            if self._queues and silent > self._timeout:
                error = f"the pipeline at {self.endpoint} has not answered for {silent:.1f} s"
                self._fail_all(PeerLost(error))
            elif self._queues and silent > self._period:
                self.try_send(Ask("quiet"))

    async def _deliver(self, request_id: str, data: bytes) -> None:
        """Send once the connection stands; its absence is the request's failure."""
        try:
            async with asyncio.timeout(min(CONNECT_TIMEOUT, self._timeout)):
                await self._socket.send(data)
        except asyncio.CancelledError:
            # Closing the socket cancels what it still sends; ``close`` tells those who wait.
            task = asyncio.current_task()
            if not self._closed or (task is not None and task.cancelling()):
                raise
        except TimeoutError:
            queue = self._queues.get(request_id)
            if queue is not None:
                queue.put_nowait(PeerLost(f"no pipeline answers at {self.endpoint}"))

    # What follows serves this package's own streams.

    def try_send(self, message: ClientMessage) -> None:
        """Send if there is a connection; without one there is nobody it would concern."""
        sent = asyncio.ensure_future(
            self._socket.send(self._encoder.encode(message), flags=zmq.NOBLOCK)
        )
        with contextlib.suppress(zmq.Again, asyncio.InvalidStateError):
            sent.result()

    def register(self, request_id: str) -> asyncio.Queue[ServerMessage | SsdPipeError]:
        """Where the answers to a message of this id will be put."""
        if not self._queues:
            self._spoken = True  # silence counts from here
        queue = self._queues[request_id] = asyncio.Queue()
        return queue

    def forget(self, request_id: str) -> None:
        """Nobody waits for answers of this id any more."""
        self._queues.pop(request_id, None)

    def abandon(self, request_id: str) -> None:
        """Cancel a request whose stream was dropped, from whatever thread that happened on."""

        def cancel() -> None:
            if not self._closed and self._queues.pop(request_id, None) is not None:
                self.try_send(Cancel(request_id))

        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(cancel)

    def _fail_all(self, error: SsdPipeError) -> None:
        for queue in self._queues.values():
            queue.put_nowait(error)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _as_error(failure: Failure) -> RequestError:
    error = RequestError(failure.code, failure.message)
    error.field = failure.field  # the message names it already
    return error
