"""Start-up probe: which transport really moves bytes between two processes, and how fast.

Both processes open every candidate they can. The responder announces on all of them which ones it
could not open, and echoes; the initiator tries them in order and settles on the first that
brings every byte back. The verdict travels over the transport it names, so nothing else is needed.

Run as a module it is the responder: ``python -m ipc.probe SHM_DIR RUN LINK``.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from ipc.channel import Channel
from ipc.errors import PeerLost, ResourceError, SsdPipeError
from ipc.rundir import RunDir
from ipc.running_time import RunningTime
from ipc.shm_channel import ShmChannel
from ipc.zmq_channel import ZmqChannel

PAYLOADS = (1, 64, 4096, 65536)  # bytes, each with its own random content
ROUND_TRIPS = 50
CANDIDATE_TIMEOUT = 2.0  # seconds for one answer once the peer is known to be there
_TURN = 0.1  # seconds; of waits for the peer
_ANNOUNCE, _PING, _VERDICT = b"A", b"P", b"V"


class Candidate(Protocol):
    """A transport that may or may not work between two processes."""

    @property
    def name(self) -> str:
        """As in the configuration."""

    def open(self, rundir: RunDir, link: str, initiator: bool) -> tuple[Channel, Channel]:
        """Outgoing and incoming channel. Raises ResourceError if it cannot work here."""

    def probe(self, out: Channel, back: Channel) -> float:
        """Initiator: round-trip time in seconds. Raises SsdPipeError if bytes do not come back."""

    def remove(self, rundir: RunDir, link: str) -> None:
        """Initiator, at the end: remove what ``open`` left in the run directory."""


class ShmCandidate:
    """Rings and doorbells in the run directory."""

    name = "shm"

    def __init__(self, capacity: int = 256 << 10) -> None:
        self._capacity = capacity

    def open(self, rundir: RunDir, link: str, initiator: bool) -> tuple[Channel, Channel]:
        out, back = directions(link, initiator)
        sender = ShmChannel.open(rundir, out, self._capacity)
        return sender, ShmChannel.open(rundir, back, self._capacity)

    def probe(self, out: Channel, back: Channel) -> float:
        return echo_round_trip(out, back)

    def remove(self, rundir: RunDir, link: str) -> None:
        for name in directions(link, True):
            rundir.segment(name).unlink(missing_ok=True)
            rundir.bell(name).unlink(missing_ok=True)


class ZmqCandidate:
    """ZeroMQ PUSH/PULL; each side binds what it receives on."""

    name = "zmq"

    def open(self, rundir: RunDir, link: str, initiator: bool) -> tuple[Channel, Channel]:
        out, back = directions(link, initiator)
        receiver = ZmqChannel.receiver(rundir.endpoint(back))
        return ZmqChannel.sender(rundir.endpoint(out), linger_ms=1000), receiver

    def probe(self, out: Channel, back: Channel) -> float:
        return echo_round_trip(out, back)

    def remove(self, rundir: RunDir, link: str) -> None:
        for name in directions(link, True):
            rundir.socket(name).unlink(missing_ok=True)


CANDIDATES: tuple[Candidate, ...] = (ShmCandidate(), ZmqCandidate())


class ProbeReport(msgspec.Struct, frozen=True):
    """Outcome of a probe.

    Attributes:
        transport: the first candidate that works.
        round_trips: microseconds (median, 64 bytes) of each candidate that was tried and works.
        rejected: why each other one was passed over.
    """

    transport: str
    round_trips: dict[str, float] = {}
    rejected: dict[str, str] = {}


def candidates(transport: str) -> tuple[Candidate, ...]:
    """What a ``run.transport`` setting allows, in order of preference."""
    return tuple(c for c in CANDIDATES if transport in ("auto", c.name))


def initiate(
    rundir: RunDir,
    link: str,
    allowed: Sequence[Candidate] = CANDIDATES,
    timeout: float = 30.0,
    try_all: bool = False,
) -> ProbeReport:
    """One side of the probe; the other calls ``respond`` with the same arguments.

    Args:
        rundir: this side's run directory.
        link: a name both sides agree on, unique within the run.
        allowed: candidates, the best first.
        timeout: seconds the other side may take to come.
        try_all: measure every candidate, for reports; otherwise stop at the first that works.

    Raises:
        PeerLost: the other side did not come.
        ResourceError: no candidate works; the text has each one's reason.
    """
    with contextlib.ExitStack() as stack:
        links, rejected = _open_all(stack, rundir, link, allowed, initiator=True)
        if links:
            theirs = _await_announcement(links, timeout)
            rejected |= {n: f"other side: {r}" for n, r in theirs.items() if n not in rejected}
        round_trips: dict[str, float] = {}
        for candidate in allowed:
            if candidate.name in rejected or (round_trips and not try_all):
                continue
            try:
                seconds = candidate.probe(*links[candidate.name])
                round_trips[candidate.name] = round(seconds * 1e6, 1)
            except SsdPipeError as error:
                rejected[candidate.name] = str(error)
        if not round_trips:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in rejected.items())
            raise ResourceError(f"no transport works ({reasons})")
        chosen = next(iter(round_trips))
        out, back = links[chosen]
        out.send(_VERDICT + chosen.encode())
        _expect(back, _VERDICT)
        return ProbeReport(chosen, round_trips, rejected)


def respond(
    rundir: RunDir, link: str, allowed: Sequence[Candidate] = CANDIDATES, timeout: float = 30.0
) -> str:
    """The echoing side; returns the transport the initiator chose.

    Raises PeerLost if it did not choose within ``timeout`` seconds.
    """
    clock = RunningTime(_TURN)
    with contextlib.ExitStack() as stack:
        links, rejected = _open_all(stack, rundir, link, allowed, initiator=False)
        for out, _ in links.values():
            out.send(_ANNOUNCE + msgspec.msgpack.encode(rejected))
        while links and clock.read() < timeout:
            for out, back in links.values():
                message = back.recv(0.0005)
                while message is not None:
                    out.send(message)
                    if message[:1] == _VERDICT:
                        return message[1:].decode()
                    message = back.recv(0.02)  # the initiator tests one transport at a time
        raise PeerLost(f"probe {link}: no verdict within {timeout:g} s")


def probe_with_child(
    rundir: RunDir, allowed: Sequence[Candidate] = CANDIDATES, try_all: bool = False
) -> ProbeReport:
    """Probe against a process started for it, which loads nothing heavy. Raises as ``initiate``."""
    link = f"probe-{os.getpid()}"
    command = [sys.executable, "-m", "ipc.probe", str(rundir.path.parent.parent), rundir.name, link]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        return initiate(rundir, link, allowed, try_all=try_all)
    finally:
        try:
            child.wait(CANDIDATE_TIMEOUT)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def describe(shm_dir: str | Path) -> dict[str, str]:
    """Every transport and what it does on this machine, for people; uses a run of its own."""
    try:
        with RunDir.create(shm_dir) as rundir:
            report = probe_with_child(rundir, try_all=True)
    except SsdPipeError as error:
        return {c.name: str(error) for c in CANDIDATES}
    works = {n: f"works, round trip {us:g} us" for n, us in report.round_trips.items()}
    return works | {n: f"does not work: {why}" for n, why in report.rejected.items()}


def echo_round_trip(out: Channel, back: Channel) -> float:
    """Send payloads, compare what comes back, then time 64-byte round trips (median, seconds)."""
    for size in PAYLOADS:
        message = _PING + os.urandom(size)
        out.send(message, CANDIDATE_TIMEOUT)
        if _expect(back, _PING) != message[1:]:
            raise PeerLost(f"{size} bytes came back changed")
    message = _PING + os.urandom(63)
    times = []
    for _ in range(ROUND_TRIPS):
        start = time.perf_counter()
        out.send(message, CANDIDATE_TIMEOUT)
        _expect(back, _PING)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _expect(back: Channel, kind: bytes) -> bytes:
    """Body of the next message of ``kind``; announcements that came another way are skipped."""
    clock = RunningTime(_TURN)
    while (left := CANDIDATE_TIMEOUT - clock.read()) > 0:
        message = back.recv(min(left, _TURN))
        if message is not None and message[:1] != _ANNOUNCE:
            if message[:1] != kind:
                raise PeerLost(f"unexpected answer {message[:1]!r}")
            return message[1:]
    raise PeerLost(f"no answer within {CANDIDATE_TIMEOUT:g} s")


def _open_all(
    stack: contextlib.ExitStack,
    rundir: RunDir,
    link: str,
    allowed: Sequence[Candidate],
    initiator: bool,
) -> tuple[dict[str, tuple[Channel, Channel]], dict[str, str]]:
    links, rejected = {}, {}
    for candidate in allowed:
        if initiator:
            stack.callback(candidate.remove, rundir, link)
        try:
            pair = candidate.open(rundir, link, initiator)
        except SsdPipeError as error:
            rejected[candidate.name] = str(error)
            continue
        for channel in pair:
            stack.callback(channel.close)
        links[candidate.name] = pair
    return links, rejected


def _await_announcement(
    links: dict[str, tuple[Channel, Channel]], timeout: float
) -> dict[str, str]:
    clock = RunningTime(_TURN)
    while clock.read() < timeout:
        for _, back in links.values():
            message = back.recv(0.002)
            if message is not None and message[:1] == _ANNOUNCE:
                return msgspec.msgpack.decode(message[1:], type=dict[str, str])
    raise PeerLost(f"probe: the other process did not come within {timeout:g} s")


def directions(link: str, initiator: bool) -> tuple[str, str]:
    """Names of a link's channels: outgoing, incoming."""
    forward, backward = f"{link}-fwd", f"{link}-back"
    return (forward, backward) if initiator else (backward, forward)


def _main(shm_dir: str, run: str, link: str) -> None:
    with RunDir.open(shm_dir, run) as rundir:
        respond(rundir, link)


if __name__ == "__main__":
    _main(*sys.argv[1:])
