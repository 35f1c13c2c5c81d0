"""The public ROUTER socket: whole, valid messages in; replies out without ever waiting.

It also tells when a client's connection has gone, even if nothing is being sent to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils.monitor import recv_monitor_message

from ipc import sockets
from ipc.curve import ZAP_DOMAIN, KeyPair, KnownClients
from ipc.messages.client import MAX_ID, ClientMessage, Failure, ServerMessage
from procs.error_text import shortened
from ssd_pipe.endpoint import MAX_MESSAGE
from ssd_pipe.errors import RequestError, ResourceError
from ssd_pipe.params import wrong_type

LINGER_MS = 1000  # for the last answers when the group stops
_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class _MessageId(msgspec.Struct):
    """Reads only the id out of a message that is wrong elsewhere."""

    id: str = ""


class ClientPort:
    """Owns the public endpoint; to be made and used on the running event loop.

    Args:
        endpoint: address to bind.
        gone: called with the identity of a client whose connection has closed, or that has
            stopped reading.
        counters: ``bad_messages`` and ``failed_handshakes`` are counted here: what was no message,
            and connections that did not speak ZMTP or had no right key.

    Attributes:
        failed_at: monotonic time of the last Failure, in seconds.

    Raises ResourceError if the address is in use.
    """

    def __init__(
        self, endpoint: str, gone: Callable[[bytes], None], counters: Counter[str]
    ) -> None:
        # A message over MAX_MESSAGE gets an answer; one that no buffer should hold cuts the line.
        self._socket = sockets.make_async(
            zmq.ROUTER, max_bytes=8 * MAX_MESSAGE, linger_ms=LINGER_MS
        )
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            sockets.bind_also(self._socket, endpoint)
        except ResourceError:
            self._socket.close()
            raise
        self.failed_at = -math.inf
        self._authenticator: AsyncioAuthenticator | None = None
        self._gone = gone
        self._counters = counters
        counters.update(bad_messages=0, failed_handshakes=0)  # shown from the start
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ClientMessage] = msgspec.msgpack.Decoder(
            ClientMessage
        )
        self._id_decoder = msgspec.msgpack.Decoder(_MessageId)
        self._client_on: dict[int, bytes] = {}
        self._monitor = sockets.watch(self._socket, zmq.EVENT_DISCONNECTED | _HANDSHAKE_FAILED)
        self._monitor_fd = int(self._monitor.getsockopt(zmq.FD))
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._monitor_fd, self._read_monitor)

    def open_to_others(
        self, endpoint: str, pair: KeyPair | None, known: KnownClients | None
    ) -> None:
        """Listen on one more address, with CURVE keys if there are any.

        Args:
            endpoint: the address.
            pair: the server's keys.
            known: who may come in; None = everybody who knows the server's public key.

        Raises:
            ResourceError: the address is in use, or exposed and there are no keys.
        """
        if known is not None:
            self._authenticator = AsyncioAuthenticator(sockets.context())
            self._authenticator.start()
            self._authenticator.configure_curve_callback(ZAP_DOMAIN, known)
        sockets.bind_also(self._socket, endpoint, pair, known is not None)

    async def recv(self) -> tuple[bytes, ClientMessage]:
        """The next valid message and who sent it; others are answered with a Failure here."""
        while True:
            frames = await self._socket.recv_multipart(copy=False)
            client = frames[0].bytes
            # libzmq reports a disconnect before it closes the descriptor: with the reports read
            # first, a new connection of the same number is never taken for the old one.
            self._read_monitor()
            with contextlib.suppress(zmq.ZMQError):  # not a transport with descriptors
                self._client_on[int(frames[-1].get(zmq.SRCFD))] = client
            body = [frame.buffer for frame in frames[1:]]
            try:
                return client, self._decode(body)
            except RequestError as error:
                self._counters["bad_messages"] += 1
                self.fail(client, self._id_of(body), error)

    def send(self, client: bytes, message: ServerMessage) -> None:
        """Never blocks: a client that is gone, or whose queue is full, is reported as gone."""
        sent = asyncio.ensure_future(
            self._socket.send_multipart([client, self._encoder.encode(message)], flags=zmq.NOBLOCK)
        )
        if sent.done() and sent.exception() is not None:
            # Not at once: the caller is in the middle of something with this client's requests.
            self._loop.call_soon(self._gone, client)

    def fail(self, client: bytes, request_id: str, error: RequestError) -> None:
        """Send ``error`` as the answer to a request (or, with an empty id, to a message)."""
        self.failed_at = time.monotonic()
        text, field = shortened(str(error)), shortened(error.field)
        self.send(client, Failure(id=request_id, code=error.code, message=text, field=field))

    def close(self) -> None:
        """Stop watching, then deliver what is queued for at most LINGER_MS."""
        self._loop.remove_reader(self._monitor_fd)
        sockets.unwatch(self._socket, self._monitor)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._socket.close()

    def _decode(self, body: list[memoryview]) -> ClientMessage:
        if len(body) != 1:
            raise RequestError(400, f"a message is one frame, got {len(body)}")
        if len(body[0]) > MAX_MESSAGE:
            raise RequestError(413, f"message of {len(body[0])} bytes, the limit is {MAX_MESSAGE}")
        try:
            return self._decoder.decode(body[0])
        except msgspec.ValidationError as error:
            found = wrong_type(error, "params")
            if not found.field:
                found = RequestError(400, f"not a message this endpoint knows: {error}")
            raise found from None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise RequestError(400, f"not a message this endpoint knows: {error}") from None

    def _id_of(self, body: list[memoryview]) -> str:
        """The id of a message that is wrong elsewhere, empty if there is none to be read."""
        if len(body) != 1 or len(body[0]) > MAX_MESSAGE:
            return ""
        try:
            found = self._id_decoder.decode(body[0]).id
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return ""
        return found if len(found) <= MAX_ID else ""

    def _read_monitor(self) -> None:
        # The descriptor signals changes only, so everything must be read each time.
        while True:
            try:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            except zmq.Again:
                return
            if event["event"] != zmq.EVENT_DISCONNECTED:
                self._counters["failed_handshakes"] += 1
                continue
            client = self._client_on.pop(int(event["value"]), None)
            if client is not None:
                self._gone(client)
