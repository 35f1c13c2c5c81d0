"""One-way byte channel over ZeroMQ PUSH/PULL, for processes on different hosts or without rings."""

from __future__ import annotations

import time

import zmq

from ipc import sockets
from ipc.errors import PeerLost
from ipc.running_time import RunningTime

_TURN = 0.05  # seconds; of a wait for room


class ZmqChannel:
    """The receiver binds, the sender connects; either may come first."""

    def __init__(self, sock: zmq.Socket[bytes], endpoint: str, stop_fd: int = -1) -> None:
        self.endpoint = endpoint
        self._socket = sock
        self._poller = zmq.Poller()
        self._poller.register(sock, zmq.POLLIN)
        if stop_fd >= 0:
            self._poller.register(stop_fd, zmq.POLLIN)

    @classmethod
    def sender(cls, endpoint: str, linger_ms: int = 0) -> ZmqChannel:
        """The sending side."""
        return cls(sockets.connect(zmq.PUSH, endpoint, linger_ms=linger_ms), endpoint)

    @classmethod
    def receiver(cls, endpoint: str, stop_fd: int = -1) -> ZmqChannel:
        """The receiving side; ``stop_fd`` as in ShmChannel. Raises ResourceError if in use."""
        sock = sockets.bind(zmq.PULL, endpoint)
        return cls(sock, sockets.address(sock), stop_fd)

    def send(self, data: bytes | bytearray, timeout: float = 10.0) -> None:
        """Send one record. Raises PeerLost if the queue stays full for ``timeout`` seconds."""
        try:
            self._socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            clock, left = RunningTime(_TURN), timeout
            while not self._socket.poll(round(max(0.0, min(left, _TURN)) * 1000), zmq.POLLOUT):
                left = timeout - clock.read()
                if left <= 0:
                    raise PeerLost(f"{self.endpoint}: queue full for {timeout:g} s") from None
            self._socket.send(data, zmq.NOBLOCK)

    def recv(self, timeout: float) -> bytes | None:
        """The next record; None if none came within ``timeout`` seconds or the stop flag is up."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                return self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                left = deadline - time.monotonic()
            if left <= 0:
                return None
            events = dict(self._poller.poll(max(1, round(left * 1000))))
            if events and self._socket not in events:
                return None

    def fileno(self) -> int:
        """Readable when a record may be waiting; call ``recv(0)`` until it returns None."""
        return int(self._socket.getsockopt(zmq.FD))

    def waiting(self) -> bool:
        """Whether a record is there."""
        return bool(self._socket.poll(0))

    def also_watch(self, fd: int) -> None:
        """Let ``recv`` return early, with None, when ``fd`` is readable too."""
        self._poller.register(fd, zmq.POLLIN)

    def close(self) -> None:
        """Close this side. Idempotent."""
        self._socket.close()
