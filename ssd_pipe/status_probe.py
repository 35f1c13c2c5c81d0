"""Asks the public endpoint how the pipeline is, without ever waiting for the answer."""

from __future__ import annotations

import msgspec
import zmq

from ipc import sockets
from ipc.messages.client import Ask, ServerMessage, StatusReply

LARGEST = 1 << 20  # bytes; a status has a few thousand


class StatusProbe:
    """A DEALER that asks for status every ``interval`` seconds and takes answers when they come.

    Attributes:
        answered: time of the last answer, by the caller's clock, which begins at 0.
    """

    def __init__(self, endpoint: str, interval: float) -> None:
        self.answered = 0.0
        self.interval = interval
        self._asked = float("-inf")
        self._socket = sockets.make(zmq.DEALER, hwm=4, max_bytes=LARGEST)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
        sockets.connect_also(self._socket, endpoint)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ServerMessage)

    def restart(self) -> None:
        """Another clock of the caller's begins."""
        self.answered, self._asked = 0.0, float("-inf")

    def poll(self, now: float) -> StatusReply | None:
        """Ask if it is time, return the newest answer that is in, if any. Never blocks."""
        if now - self._asked >= self.interval:
            try:
                self._socket.send(self._encoder.encode(Ask("supervisor")), zmq.NOBLOCK)
                self._asked = now
            except zmq.Again:
                pass  # nobody listens yet
        newest = None
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return newest
            try:
                reply = self._decoder.decode(frames[-1])
            except msgspec.DecodeError:
                continue
            if isinstance(reply, StatusReply):
                newest, self.answered = reply, now

    def close(self) -> None:
        self._socket.close()
