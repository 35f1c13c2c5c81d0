"""Who belongs to a run, how each of them is, and who is missed."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import zmq
from structlog.typing import FilteringBoundLogger

from ipc.messages.hub import Hello, ProcessState, Ready
from ipc.running_time import RunningTime
from procs.hub_link import TURNS_PER_TIMEOUT
from procs.peer import Peer
from ssd_pipe.config import PipelineConfig
from ssd_pipe.restarts import solo_roles

LOADING_SILENCE = 60.0  # seconds; importing a large library can hold up even the beat thread
LAST_WORDS = 0.2  # seconds between a process's death and taking it for one without a message


class Loss(NamedTuple):
    """A process that is missed, and why: one line that names it."""

    name: str
    reason: str


class Roster:
    """The hub's knowledge of its peers. Its thread writes it, other threads may ask.

    Attributes:
        peers: every expected process by name.
        ready: the group has been ready; from then on some processes may come and go.
        leaving: everybody has been told to leave, so that no exit is a loss any more.
        first_loss: the first process that is missed; None while none is.
    """

    def __init__(self, names: list[str], config: PipelineConfig, log: FilteringBoundLogger) -> None:
        self.peers = {name: Peer(name) for name in names}
        self.ready = False
        self.leaving = False
        self.first_loss: Loss | None = None
        self._digest = config.digest()
        self._limit = config.run.beat_timeout
        self._clock = RunningTime(config.run.beat_timeout / TURNS_PER_TIMEOUT)
        self._solo_roles = solo_roles(config)
        self._absences: dict[str, str] = {}
        self._log = log
        self._lock = threading.Lock()

    # ------------------------------------------------------------ for any thread

    def absence(self, name: str) -> str:
        """Why a process that the group can do without is not there, empty while it is. Cheap."""
        return self._absences.get(name, "")

    def late(self) -> dict[str, str]:
        """Names and states of those that are not ready."""
        with self._lock:
            return {n: p.state for n, p in self.peers.items() if p.state != "ready"}

    def facts(self) -> dict[str, dict[str, int]]:
        """What each process has reported with Ready."""
        with self._lock:
            return {name: peer.facts for name, peer in self.peers.items()}

    def states(self, own_name: str, own_notes: dict[str, str]) -> list[ProcessState]:
        """This process, called ``own_name``, and every expected one as last seen."""
        own = "stopping" if self.leaving else "ready" if self.ready else "starting"
        with self._lock:
            now = self._clock.now
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
                for p in self.peers.values()
            ]
        mine = ProcessState(name=own_name, pid=os.getpid(), state=own, notes=own_notes)
        return [mine, *states]

    # ------------------------------------------------------------ for the hub's thread

    def refusal(self, hello: Hello) -> str:
        """Why a process may not join, empty if it may."""
        peer = self.peers.get(hello.name)
        if peer is None:
            return f"this run has no process {hello.name!r}, it has {', '.join(self.peers)}"
        if peer.died:
            self._lose_dead(peer)  # whoever comes in its place need not wait for its last words
        if peer.state == "dead" and not self._can_return(peer):
            return f"{hello.name} has failed before, and the group is going down"
        if peer.state == "dead" and peer.pidfd >= 0:
            return f"{hello.name} is there already and hangs (pid {peer.pid})"
        if peer.state not in {"", "dead"}:
            return f"{hello.name} is connected already (pid {peer.pid})"
        if hello.config_digest != self._digest:
            return "it was started with another configuration than the scheduler"
        return ""

    def join(self, name: str, sock: zmq.Socket[bytes], pid: int) -> Peer:
        """Take in a process that may join."""
        peer = self.peers[name]
        with self._lock:
            peer.connect(sock, pid, self._clock.now)
        self._log.info("connected", peer=name, pid=pid)
        return peer

    def hear(self, peer: Peer) -> None:
        """It has sent something."""
        peer.hear(self._clock.now)

    def get_ready(self, peer: Peer, ready: Ready) -> None:
        """A process has loaded."""
        with self._lock:
            peer.state, peer.facts = "ready", ready.facts
            # What its predecessor found out together with others still holds.
            peer.notes = peer.notes | ready.notes
        self._absences.pop(peer.name, None)
        self._log.info("peer ready", peer=peer.name, **ready.facts)

    def leave(self) -> None:
        """Everybody is told to."""
        with self._lock:
            for peer in self.peers.values():
                if peer.state in {"starting", "ready"}:
                    peer.state = "stopping"

    def note_deaths(self, readable: Mapping[Any, int], poller: zmq.Poller) -> None:
        """Look for processes whose pidfd is ``readable``."""
        for peer in self.peers.values():
            if peer.pidfd >= 0 and peer.pidfd in readable:
                peer.forget_process(poller)
                peer.died = time.monotonic()

    def next_verdict(self) -> float:
        """Monotonic time at which a death that was noted becomes a loss; infinity for none."""
        deaths = [peer.died + LAST_WORDS for peer in self.peers.values() if peer.died]
        return min(deaths, default=float("inf"))

    def judge(self) -> bool:
        """Miss those that have died or are silent; True if anybody was. Due in every turn."""
        now = time.monotonic()
        missed = False
        for peer in self.peers.values():
            if peer.died and now - peer.died >= LAST_WORDS:
                missed |= self._lose_dead(peer)
        return self._judge_silence() or missed

    def _judge_silence(self) -> bool:
        now = self._clock.read()
        waited = {
            peer: (now - peer.last_heard) / self._allowed(peer)
            for peer in self.peers.values()
            if peer.state in {"starting", "ready"} and not peer.died
        }
        late = [peer for peer, share in waited.items() if share > 1]
        quiet = [peer for peer, share in waited.items() if share > 0.5]
        if late and len(quiet) > 1 and not any(peer.excused for peer in late):
            # They hardly all hang at once: the machine did, or what is between us.
            for peer in quiet:
                peer.last_heard, peer.excused = now, True
            self._log.warning("silent together", peers=[peer.name for peer in quiet])
            return False
        for peer in late:
            self.lose(peer, f"no heartbeat for {self._allowed(peer):g} s")
        return bool(late)

    def _allowed(self, peer: Peer) -> float:
        """Seconds that it may be silent."""
        return max(self._limit, LOADING_SILENCE) if peer.state == "starting" else self._limit

    def lose(self, peer: Peer, what: str, missed: str = "") -> bool:
        """A process has failed, died or fallen silent; False if that was known.

        ``missed``: the process without which it could not go on, if it says so.
        """
        if peer.state == "dead":
            return False
        reason = f"{peer.name}: {what}"
        with self._lock:
            peer.state, peer.detail = "dead", what
        if self._can_return(peer):
            self._absences[peer.name] = reason
        elif not self.leaving:
            self.first_loss = self.first_loss or Loss(missed or peer.name, reason)
        if not self.leaving:
            self._log.error("lost", peer=peer.name, reason=what, file_only=True)
        return True

    def _lose_dead(self, peer: Peer) -> bool:
        peer.died = 0.0
        return self.lose(peer, f"process {peer.pid} died")

    def _can_return(self, peer: Peer) -> bool:
        """Whether the group goes on without this process and takes another one in its place."""
        role = peer.name.partition("-")[0]
        return role in self._solo_roles and self.ready and not self.leaving
