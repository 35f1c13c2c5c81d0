"""A process's connection to the hub: handshake, heartbeats both ways, orders from the hub.

One background thread owns the socket, so heartbeats go out while the main thread computes.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque

import msgspec
import zmq

from ipc import sockets
from ipc.messages.hub import (
    Beat,
    Failed,
    GroupReady,
    Hello,
    HubMessage,
    PeerMessage,
    Ready,
    Refused,
    Shutdown,
    Welcome,
)
from ipc.running_time import RunningTime
from procs.liveness import Pulse, StopFlag, Wakeup, readable
from ssd_pipe.errors import PeerLost, ResourceError
from ssd_pipe.members import HUB_ROLE

BEATS_PER_TIMEOUT = 4
TURN = 0.25  # seconds; of waits for the group
TURNS_PER_TIMEOUT = 20  # of the loops that judge by silence
FLUSH_MS = 1000  # what ``close`` may spend on delivering the last message
MAX_MESSAGE = 1 << 20


class HubLink:
    """Attributes: ``lost`` says how the hub was lost, empty while it was not."""

    def __init__(
        self,
        endpoint: str,
        name: str,
        config_digest: str,
        beat_timeout: float,
        pulse: Pulse,
        stopping: StopFlag,
    ) -> None:
        """Connects and says Hello; the hub may come later.

        Args:
            endpoint: the hub's address.
            name: this process.
            config_digest: of this process's configuration.
            beat_timeout: seconds without a sign of the hub after which it counts as lost.
            pulse: beats go out only while it beats.
            stopping: raised when the hub says so or is lost.
        """
        self.lost = ""
        self._name = name
        self._beat_timeout = beat_timeout
        self._pulse = pulse
        self._stopping = stopping
        self._is_local = sockets.ipc_path(endpoint) is not None
        self._answer: Welcome | Refused | None = None
        self._group: GroupReady | None = None
        self._closing = False
        self._outbox: deque[PeerMessage] = deque()
        self._wake = Wakeup()  # main thread -> link thread
        self._news = Wakeup()  # link thread -> main thread
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(HubMessage)
        self._over = False  # the hub that has answered has left, and nobody comes in its place
        # Its own, to be waited for: what is still queued when a process exits is dropped.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = sockets.make(zmq.DEALER, max_bytes=MAX_MESSAGE, within=self._context)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        sockets.connect_also(self._socket, endpoint)
        self._hello = Hello(name=name, pid=os.getpid(), config_digest=config_digest)
        self._post(self._hello)
        self._turn = beat_timeout / TURNS_PER_TIMEOUT
        self._clock = RunningTime(self._turn)
        self._last_heard = 0.0
        self._thread = threading.Thread(target=self._run, name="hub-link", daemon=True)
        self._thread.start()

    def handshake(self, timeout: float) -> Welcome:
        """Wait for the hub's answer.

        Raises:
            ResourceError: refused.
            PeerLost: no answer within ``timeout`` seconds.
            Stopping: asked to stop meanwhile.
        """
        clock = RunningTime(TURN)
        while self._answer is None:
            if not self._wait(timeout - clock.read()):
                text = f"scheduler: no answer to {self._name} within {timeout:g} s"
                raise PeerLost(text, HUB_ROLE)
        if isinstance(self._answer, Refused):
            raise ResourceError(f"the scheduler refused {self._name}: {self._answer.message}")
        return self._answer

    def ready(
        self, facts: dict[str, int], timeout: float, notes: dict[str, str] | None = None
    ) -> dict[str, int]:
        """Report Ready, wait for the whole group, return its facts. Raises as ``handshake``."""
        self._post(Ready(name=self._name, facts=facts, notes=notes or {}))
        clock = RunningTime(TURN)
        while self._group is None:
            if not self._wait(timeout - clock.read()):
                raise PeerLost(f"the other processes were not ready within {timeout:g} s")
        return self._group.facts

    def failed(self, message: str, peer: str = "") -> None:
        """Tell the hub why this process ends, and whom it misses if that is why."""
        self._post(Failed(name=self._name, message=message, peer=peer))

    def close(self) -> None:
        """Deliver what is queued and disconnect. Idempotent."""
        if self._closing:
            return
        self._closing = True
        self._wake.set()
        self._thread.join()
        self._wake.close()
        self._news.close()

    def _post(self, message: PeerMessage) -> None:
        self._outbox.append(message)
        self._wake.set()

    def _wait(self, left: float) -> bool:
        """Sleep until there is news, for a turn at most; False if no time is ``left``.

        Raises PeerLost or Stopping.
        """
        if self.lost:
            raise PeerLost(self.lost, HUB_ROLE)
        self._stopping.check()
        if left <= 0:
            return False
        readable([self._news.fileno(), self._stopping.fileno()], min(left, TURN))
        self._news.clear()
        return True

    # ------------------------------------------------------------ link thread

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (self._socket, self._monitor, self._wake.fileno()):
            poller.register(source, zmq.POLLIN)
        interval = self._beat_timeout / BEATS_PER_TIMEOUT
        next_beat = time.monotonic() + interval
        while not self._closing:
            due = min(self._turn, next_beat - time.monotonic())
            poller.poll(max(1, round(due * 1000)))
            self._clock.read()
            self._wake.clear()
            # What the hub said last is read before it is judged: it may have said goodbye, and
            # this thread may have been held up longer than the hub.
            gone = self._disconnected()
            self._take()
            if gone and self._answer is None:
                self._outbox.append(self._hello)  # to the hub's successor
            self._judge(gone)
            self._send_queued()
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + interval
                if isinstance(self._answer, Welcome) and self._pulse.beating():
                    self._send(Beat(self._name))
        self._send_queued()
        over = self._over or (self._disconnected() and self._is_local)
        if isinstance(self._answer, Welcome) and not over:
            self._socket.setsockopt(zmq.LINGER, FLUSH_MS)
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
        self._context.term()  # within FLUSH_MS

    def _take(self) -> None:
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._last_heard = self._clock.now
            try:
                message = self._decoder.decode(frame)
            except msgspec.MsgspecError as error:
                self._lose(f"scheduler: unreadable message: {error}")
                return
            if isinstance(message, Welcome | Refused):
                self._answer = message
            elif isinstance(message, GroupReady):
                self._group = message
            elif isinstance(message, Shutdown):
                self._stopping.set(message.reason)
            self._news.set()

    def _judge(self, gone: bool) -> None:
        if not isinstance(self._answer, Welcome):
            return
        # A broken connection on one host means that the process is gone; between hosts it may
        # come back, and silence decides.
        self._over = self._over or (gone and self._is_local)
        if self._stopping.is_set():
            return
        if self._over:
            self._lose("scheduler: connection closed")
        elif self._clock.now - self._last_heard > self._beat_timeout:
            self._lose(f"scheduler: no heartbeat for {self._beat_timeout:g} s")

    def _lose(self, how: str) -> None:
        if not self._stopping.is_set():
            self.lost = how
            self._stopping.set(how)
            self._news.set()

    def _disconnected(self) -> bool:
        """Whether the connection broke since the last call; no other event is subscribed to."""
        seen = False
        while self._monitor.poll(0):
            self._monitor.recv_multipart()
            seen = True
        return seen

    def _send_queued(self) -> None:
        while self._outbox:
            self._send(self._outbox.popleft())

    def _send(self, message: PeerMessage) -> None:
        try:
            self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            self._lose("scheduler: takes no messages")
