"""The hub: where the processes of a run meet. It lives in the scheduler's process.

A background thread owns the socket: it answers Hello, exchanges heartbeats, and notices when a
process dies (at once on this machine, by silence elsewhere), while the scheduler computes.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from types import TracebackType
from typing import Any

import msgspec
import zmq

from ipc import sockets
from ipc.messages import (
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
from procs.hub_link import BEATS_PER_TIMEOUT, FLUSH_MS, MAX_MESSAGE
from procs.liveness import Wakeup, readable
from procs.peer import Peer, local_pid
from procs.runtime import Runtime, process_name
from ssd_pipe.config import PipelineConfig
from ssd_pipe.errors import PeerLost

LOADING_SILENCE = 60.0  # seconds; importing a large library can hold up even the beat thread
LAST_WORDS = 0.2  # seconds between a process's death and taking it for one without a message


class Hub:
    """A context manager; leaving it tells every process to shut down."""

    def __init__(self, runtime: Runtime, endpoint: str = "") -> None:
        """Bind and start listening.

        Args:
            runtime: of the process the hub lives in.
            endpoint: an address for processes on other machines, besides the run directory's.

        Raises:
            ResourceError: an address is in use.
        """
        self._runtime = runtime
        self._digest = runtime.config.digest()
        self._limit = runtime.config.run.beat_timeout
        self._own_ready = False
        self._lock = threading.Lock()
        self._peers = {name: Peer(name) for name in expected_names(runtime.config)}
        self._by_route: dict[bytes, Peer] = {}
        self._first_loss = ""
        self._outbox: deque[HubMessage] = deque()
        self._leaving = False
        self._closing = False
        self._wake = Wakeup()  # to the hub's thread
        self._news = Wakeup()  # to the scheduler
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(PeerMessage)
        self._poller = zmq.Poller()
        self._sockets = []
        for address in filter(None, (runtime.rundir.endpoint("hub"), endpoint)):
            sock = sockets.bind(zmq.ROUTER, address, max_bytes=MAX_MESSAGE, linger_ms=FLUSH_MS)
            self._sockets.append(sock)
            self._poller.register(sock, zmq.POLLIN)
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
        deadline = time.monotonic() + timeout
        while True:
            self.raise_lost()
            with self._lock:
                late = {n: p.state for n, p in self._peers.items() if p.state != "ready"}
                if not late:
                    return {name: peer.facts for name, peer in self._peers.items()}
            self._runtime.stopping.check()
            left = deadline - time.monotonic()
            if left <= 0:
                who = ", ".join(f"{n} ({state or 'not connected'})" for n, state in late.items())
                raise PeerLost(f"not ready within {timeout:g} s: {who}")
            readable([self._news.fileno(), self._runtime.stopping.fileno()], left)
            self._news.clear()

    def announce(self, facts: dict[str, int]) -> None:
        """Tell everybody that the group is ready. From now on the scheduler must be ``alive``."""
        self._own_ready = True
        self._runtime.pulse.begin()
        self.broadcast(GroupReady(facts=facts))

    def raise_lost(self) -> None:
        """Raise PeerLost if any process has been lost, naming the first. Cheap."""
        if self._first_loss:
            raise PeerLost(self._first_loss)

    def broadcast(self, message: HubMessage) -> None:
        """Send to every connected process. After Shutdown, their exits are no losses."""
        self._leaving = self._leaving or isinstance(message, Shutdown)
        self._outbox.append(message)
        self._wake.set()

    def states(self) -> list[ProcessState]:
        """Every expected process and this one, as last seen."""
        own = "stopping" if self._leaving else "ready" if self._own_ready else "starting"
        with self._lock:
            now = time.monotonic()
            states = [
                ProcessState(
                    name=p.name,
                    pid=p.pid,
                    state=p.state or "starting",
                    detail=p.detail,
                    port=p.facts.get("port", 0),
                    notes=p.notes,
                    silent=now - p.last_heard if p.state else 0.0,
                )
                for p in self._peers.values()
            ]
        mine = ProcessState(
            name=self._runtime.name, pid=os.getpid(), state=own, notes=self._runtime.notes
        )
        return [mine, *states]

    def close(self, reason: str = "scheduler stopped") -> None:
        """Tell everybody to shut down, deliver that, and stop listening. Idempotent."""
        if self._closing:
            return
        if not self._leaving:
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

    # ------------------------------------------------------------ hub thread

    def _run(self) -> None:
        interval = self._limit / BEATS_PER_TIMEOUT
        next_beat = time.monotonic() + interval
        while not self._closing:
            now = time.monotonic()
            due = min([next_beat, *(p.died + LAST_WORDS for p in self._peers.values() if p.died)])
            ready = dict(self._poller.poll(max(1, round((due - now) * 1000))))
            self._wake.clear()
            self._note_deaths(ready)
            for sock in self._sockets:
                self._take(sock)
            self._judge()
            self._send_queued()
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + interval
                if self._runtime.pulse.beating():
                    self._send_all(Beat(self._runtime.name))
        self._send_queued()
        for sock in self._sockets:
            sock.close()
        for peer in self._peers.values():
            peer.forget_process(self._poller)

    def _take(self, sock: zmq.Socket[bytes]) -> None:
        while True:
            try:
                route, frame = sock.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            except ValueError:
                continue  # not one of our messages: a frame too many or too few
            try:
                message = self._decoder.decode(frame.bytes)
            except msgspec.MsgspecError:
                continue
            if isinstance(message, Hello):
                self._hello(sock, route.bytes, message, local_pid(frame))
            elif (peer := self._by_route.get(route.bytes)) is not None:
                self._hear(peer, message)

    def _hello(self, sock: zmq.Socket[bytes], route: bytes, hello: Hello, pid: int) -> None:
        peer = self._peers.get(hello.name)
        refusal = ""
        if peer is None:
            refusal = f"this run has no process {hello.name!r}, it has {', '.join(self._peers)}"
        elif peer.state == "dead":
            refusal = f"{hello.name} has failed before, and the group is going down"
        elif peer.state:
            refusal = f"{hello.name} is connected already (pid {peer.pid})"
        elif hello.config_digest != self._digest:
            refusal = "it was started with another configuration than the scheduler"
        if peer is None or refusal:
            self._runtime.log.warning("refused", peer=hello.name, pid=hello.pid, reason=refusal)
            self._send(sock, route, Refused(refusal))
            return
        with self._lock:
            peer.connect(sock, pid or hello.pid)
        self._by_route[route] = peer
        if pid:
            peer.watch_process(self._poller)
        self._runtime.log.info("connected", peer=hello.name, pid=peer.pid)
        self._send(
            sock, route, Welcome(self._runtime.rundir.name, transport=self._runtime.transport)
        )

    def _hear(self, peer: Peer, message: PeerMessage) -> None:
        peer.last_heard = time.monotonic()
        if isinstance(message, Ready) and peer.state == "starting":
            with self._lock:
                peer.state, peer.facts, peer.notes = "ready", message.facts, message.notes
            self._runtime.log.info("peer ready", peer=peer.name, **message.facts)
            self._news.set()
        elif isinstance(message, Failed):
            self._lose(peer, message.message)

    def _note_deaths(self, ready: dict[Any, int]) -> None:
        for peer in self._peers.values():
            if peer.pidfd >= 0 and peer.pidfd in ready:
                peer.forget_process(self._poller)
                peer.died = time.monotonic()

    def _judge(self) -> None:
        now = time.monotonic()
        for peer in self._peers.values():
            if peer.died:
                if now - peer.died >= LAST_WORDS:
                    peer.died = 0.0
                    self._lose(peer, f"process {peer.pid} died")
                continue
            silence = self._limit
            if peer.state == "starting":
                silence = max(silence, LOADING_SILENCE)
            if peer.state in {"starting", "ready"} and now - peer.last_heard > silence:
                self._lose(peer, f"no heartbeat for {silence:g} s")

    def _lose(self, peer: Peer, what: str) -> None:
        if peer.state == "dead":
            return
        with self._lock:
            peer.state, peer.detail = "dead", what
            if not self._leaving:
                self._first_loss = self._first_loss or f"{peer.name}: {what}"
        if not self._leaving:
            self._runtime.log.error("lost", peer=peer.name, reason=what, file_only=True)
        self._news.set()

    def _send_queued(self) -> None:
        while self._outbox:
            message = self._outbox.popleft()
            if isinstance(message, Shutdown):
                with self._lock:
                    for peer in self._peers.values():
                        peer.state = (
                            "stopping" if peer.state in {"starting", "ready"} else peer.state
                        )
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
    targets = [process_name("target", rank) for rank in range(config.target.tp)]
    draft = ["draft"] if config.speculative else []
    return ["frontend", *targets, *draft, *(["gateway"] if config.gateway.enabled else [])]
