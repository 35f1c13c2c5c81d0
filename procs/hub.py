"""The hub: where the processes of a run meet. It lives in the scheduler's process.

A background thread owns the socket: it answers Hello, exchanges heartbeats, and notices when a
process dies (at once on this machine, by silence elsewhere), while the scheduler computes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterable
from types import TracebackType

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
    ProcessState,
    Ready,
    Refused,
    Shutdown,
    Welcome,
)
from ipc.running_time import RunningTime
from procs.hub_link import BEATS_PER_TIMEOUT, FLUSH_MS, MAX_MESSAGE, TURN, TURNS_PER_TIMEOUT
from procs.liveness import Wakeup, readable
from procs.peer import Peer, local_pid
from procs.roster import Roster
from procs.runtime import Runtime
from ssd_pipe.config import PipelineConfig
from ssd_pipe.errors import PeerLost, ResourceError
from ssd_pipe.members import process_names


class Hub:
    """A context manager; leaving it tells every process to shut down.

    Attributes:
        bad_messages: how many messages came that were none; they are dropped.
    """

    def __init__(self, runtime: Runtime, endpoint: str = "") -> None:
        """Bind and start listening.

        Args:
            runtime: of the process the hub lives in.
            endpoint: an address for processes on other machines, besides the run directory's.

        Raises:
            ResourceError: an address is in use.
        """
        self.bad_messages = 0
        self._runtime = runtime
        self._roster = Roster(expected_names(runtime.config), runtime.config, runtime.log)
        self._by_route: dict[bytes, Peer] = {}
        self._outbox: deque[HubMessage] = deque()
        self._group: GroupReady | None = None
        self._closing = False
        self._wake = Wakeup()  # to the hub's thread
        self._news = Wakeup()  # to the scheduler
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(PeerMessage)
        self._poller = zmq.Poller()
        # Its own, to be waited for: what is still queued when a process exits is dropped.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        try:
            self._bind(filter(None, (runtime.rundir.endpoint("hub"), endpoint)))
        except ResourceError:
            self._context.destroy(0)
            raise
        self._poller.register(self._wake.fileno(), zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="hub", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ for the scheduler

    def wait_ready(self, timeout: float) -> dict[str, dict[str, int]]:
        """Wait until every expected process is ready; returns their facts by name.

        Raises:
            PeerLost: one failed (the text is its own message) or ``timeout`` seconds passed.
            Stopping: asked to stop meanwhile.
        """
        clock = RunningTime(TURN)
        while True:
            self.raise_lost()
            late = self._roster.late()
            if not late:
                return self._roster.facts()
            self._runtime.stopping.check()
            left = timeout - clock.read()
            if left <= 0:
                who = ", ".join(f"{n} ({state or 'not connected'})" for n, state in late.items())
                single = next(iter(late)) if len(late) == 1 else ""
                raise PeerLost(f"not ready within {timeout:g} s: {who}", single)
            fds = [self._news.fileno(), self._runtime.stopping.fileno()]
            readable(fds, min(left, TURN))
            self._news.clear()

    def announce(self, facts: dict[str, int]) -> None:
        """Tell everybody that the group is ready. From now on the scheduler must be ``alive``."""
        self._group = GroupReady(facts=facts)
        self._roster.ready = True
        self._runtime.pulse.begin()
        self.broadcast(self._group)

    def facts(self) -> dict[str, dict[str, int]]:
        """What each process, or the one that took its place, has reported when it was ready."""
        return self._roster.facts()

    def raise_lost(self) -> None:
        """Raise PeerLost if a process the group needs has been lost, naming the first. Cheap."""
        loss = self._roster.first_loss
        if loss is not None:
            raise PeerLost(loss.reason, loss.name)

    def absence(self, name: str) -> str:
        """Why a process that the group can do without is not there, empty while it is. Cheap."""
        return self._roster.absence(name)

    def broadcast(self, message: HubMessage) -> None:
        """Send to every connected process. After Shutdown, their exits are no losses."""
        self._roster.leaving = self._roster.leaving or isinstance(message, Shutdown)
        self._outbox.append(message)
        self._wake.set()

    def states(self) -> list[ProcessState]:
        """Every expected process and this one, as last seen."""
        return self._roster.states(self._runtime.name, self._runtime.notes)

    def close(self, reason: str = "scheduler stopped") -> None:
        """Tell everybody to shut down, deliver that, and stop listening. Idempotent."""
        if self._closing:
            return
        if not self._roster.leaving:
            self.broadcast(Shutdown(reason=reason))
        self._closing = True
        self._wake.set()
        self._thread.join()
        self._wake.close()
        self._news.close()

    def __enter__(self) -> Hub:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        reason = self._runtime.stopping.reason or "scheduler stopped"
        self.close(str(error) or type(error).__name__ if error is not None else reason)

    def _bind(self, addresses: Iterable[str]) -> None:
        for address in addresses:
            sock = sockets.bind(
                zmq.ROUTER,
                address,
                max_bytes=MAX_MESSAGE,
                linger_ms=FLUSH_MS,
                within=self._context,
            )
            self._sockets.append(sock)
            self._poller.register(sock, zmq.POLLIN)

    # ------------------------------------------------------------ hub thread

    def _run(self) -> None:
        limit = self._runtime.config.run.beat_timeout
        interval, turn = limit / BEATS_PER_TIMEOUT, limit / TURNS_PER_TIMEOUT
        next_beat = time.monotonic() + interval
        while not self._closing:
            due = min(next_beat, self._roster.next_verdict()) - time.monotonic()
            ready = dict(self._poller.poll(max(1, round(min(due, turn) * 1000))))
            self._wake.clear()
            self._roster.note_deaths(ready, self._poller)
            for sock in self._sockets:
                self._take(sock)
            if self._roster.judge():
                self._news.set()
            self._send_queued()
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + interval
                if self._runtime.pulse.beating():
                    self._send_all(Beat(self._runtime.name))
        self._send_queued()
        for sock in self._sockets:
            sock.close()
        self._context.term()  # within FLUSH_MS
        for peer in self._roster.peers.values():
            peer.forget_process(self._poller)

    def _take(self, sock: zmq.Socket[bytes]) -> None:
        while True:
            try:
                route, frame = sock.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            except ValueError:
                self.bad_messages += 1  # a frame too many or too few
                continue
            try:
                message = self._decoder.decode(frame.bytes)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                self.bad_messages += 1
                continue
            if isinstance(message, Hello):
                self._hello(sock, route.bytes, message, local_pid(frame))
            elif (peer := self._by_route.get(route.bytes)) is not None:
                self._hear(route.bytes, peer, message)

    def _hello(self, sock: zmq.Socket[bytes], route: bytes, hello: Hello, pid: int) -> None:
        refusal = self._roster.refusal(hello)
        if refusal:
            self._runtime.log.warning("refused", peer=hello.name, pid=hello.pid, reason=refusal)
            self._send(sock, route, Refused(refusal))
            return
        peer = self._roster.join(hello.name, sock, pid or hello.pid)
        # A predecessor's route goes: what it may still say is not this one's.
        self._by_route = {r: p for r, p in self._by_route.items() if p is not peer}
        self._by_route[route] = peer
        if pid:
            peer.watch_process(self._poller)
        welcome = Welcome(
            self._runtime.rundir.name,
            transport=self._runtime.transport,
            returning=self._group is not None,
        )
        self._send(sock, route, welcome)

    def _hear(self, route: bytes, peer: Peer, message: PeerMessage) -> None:
        self._roster.hear(peer)
        if isinstance(message, Ready) and peer.state == "starting":
            self._roster.get_ready(peer, message)
            if self._group is not None and peer.socket is not None:
                self._send(peer.socket, route, self._group)  # the others have had it
            self._news.set()
        elif isinstance(message, Failed) and self._roster.lose(peer, message.message, message.peer):
            self._news.set()

    def _send_queued(self) -> None:
        while self._outbox:
            message = self._outbox.popleft()
            if isinstance(message, Shutdown):
                self._roster.leave()
            self._send_all(message)

    def _send_all(self, message: HubMessage) -> None:
        for route, peer in self._by_route.items():
            if peer.socket is not None and peer.state != "dead":
                self._send(peer.socket, route, message)

    def _send(self, sock: zmq.Socket[bytes], route: bytes, message: HubMessage) -> None:
        # A ROUTER drops what it cannot deliver; silence then decides about the peer.
        with contextlib.suppress(zmq.Again):
            sock.send_multipart([route, self._encoder.encode(message)], zmq.NOBLOCK)


def expected_names(config: PipelineConfig) -> list[str]:
    """Names of the processes that answer to the hub."""
    roles = ("frontend", "target", "draft", "gateway")
    return [name for role in roles for name in process_names(config, role)]
