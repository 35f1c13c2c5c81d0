"""The scheduler's side of the frontend: requests in, tokens out."""

from __future__ import annotations

import msgspec
import zmq

from ipc import sockets
from ipc.messages.requests import FromScheduler, Rejected, ToScheduler
from procs.runtime import Runtime
from procs.waiting import PEER_POLL, Waiter
from ssd_pipe.errors import PeerLost, RequestError


class FrontendPort:
    """Binds both sockets; the frontend may come later."""

    def __init__(self, runtime: Runtime, waiter: Waiter) -> None:
        self._stopping = runtime.stopping
        self._waiter = waiter
        self._requests = sockets.bind(zmq.PULL, runtime.rundir.endpoint("requests"))
        self._tokens = sockets.bind(zmq.PUSH, runtime.rundir.endpoint("tokens"))
        self._decoder = msgspec.msgpack.Decoder(ToScheduler)
        self._encoder = msgspec.msgpack.Encoder()
        self._poller = zmq.Poller()
        self._poller.register(self._requests, zmq.POLLIN)
        self._poller.register(runtime.stopping.fileno(), zmq.POLLIN)
        self._rest = zmq.Poller()
        self._rest.register(self._tokens, zmq.POLLOUT)
        self._rest.register(runtime.stopping.fileno(), zmq.POLLIN)

    def wait(self, seconds: float) -> None:
        """Until a message may be there, the stop flag is up, or the time is over."""
        self._poller.poll(int(seconds * 1000))

    def fileno(self) -> int:
        """Readable when a message may have come; ``receive`` until None then."""
        return int(self._requests.getsockopt(zmq.FD))

    def receive(self) -> ToScheduler | None:
        """The next message, None if there is none."""
        try:
            frame = self._requests.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        message: ToScheduler = self._decoder.decode(frame)
        return message

    def send(self, message: FromScheduler) -> None:
        """Raises PeerLost if the frontend has died or does not read.

        When the group is stopped the frontend leaves first, and what it no longer takes is dropped
        once this process is told to stop as well.
        """
        data = self._encoder.encode(message)
        if self._took(data):
            return
        begun = self._waiter.now()
        while self._waiter.goes_on(begun):
            self._rest.poll(round(PEER_POLL * 1000))
            if self._took(data):
                return
        if not self._stopping.is_set():
            raise PeerLost("frontend: takes no tokens", "frontend")

    def _took(self, data: bytes) -> bool:
        try:
            self._tokens.send(data, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def reject(self, rid: int, error: RequestError) -> None:
        """Tell that a request cannot be served (further)."""
        self.send(Rejected(rid, error.code, str(error), error.field))
