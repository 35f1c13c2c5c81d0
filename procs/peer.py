"""One process as the hub knows it."""

from __future__ import annotations

import os
import time

import zmq


class Peer:
    """One expected process. ``state`` is empty until it connects, then as in ProcessState.

    ``last_heard`` is a time of the roster's clock; ``excused``: it was silent for too long together
    with others, and has one more interval.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.state = ""
        self.pid = 0
        self.detail = ""
        self.facts: dict[str, int] = {}
        self.notes: dict[str, str] = {}
        self.socket: zmq.Socket[bytes] | None = None
        self.last_heard = 0.0
        self.excused = False
        self.died = 0.0  # when its process ended, 0 while it runs or after that was dealt with
        self.pidfd = -1

    def connect(self, sock: zmq.Socket[bytes], pid: int, now: float) -> None:
        self.socket, self.pid, self.state = sock, pid, "starting"
        self.detail, self.facts = "", {}
        self.hear(now)

    def hear(self, now: float) -> None:
        self.last_heard, self.excused = now, False

    def watch_process(self, poller: zmq.Poller) -> None:
        try:
            self.pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            self.died = time.monotonic()
            return
        poller.register(self.pidfd, zmq.POLLIN)

    def forget_process(self, poller: zmq.Poller) -> None:
        fd, self.pidfd = self.pidfd, -1
        if fd >= 0:
            poller.unregister(fd)
            os.close(fd)


def local_pid(frame: zmq.Frame) -> int:
    """The sender's pid as the kernel tells it, 0 if it is on another machine."""
    try:
        host, _, credentials = str(frame.get("Peer-Address")).partition(":")
        return int(credentials.split(":")[-1]) if host == "localhost" and credentials else 0
    except (zmq.ZMQError, ValueError):
        return 0
