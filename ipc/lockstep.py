"""Two processes that do the same steps and tell each other how each one went.

So both give something up at the same point, for the same reason, and neither waits for the other
beyond a deadline.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from ipc.errors import PeerLost, ResourceError, SsdPipeError
from ipc.running_time import RunningTime

ANSWER_TIMEOUT = 30.0  # seconds for the other side to do the same step
_TURN = 0.2  # seconds between looks at whether this process should stop
_LONGEST = 300  # characters of a reason


class Post(Protocol):
    """One direction of a channel between the two sides."""

    def send(self, message: bytes, timeout: float = ...) -> None: ...


class Mailbox(Protocol):
    """The other direction."""

    def recv(self, timeout: float) -> bytes | None: ...


class Lockstep:
    """One side.

    Attributes:
        first: whether this side starts where the two take turns; the other's is the opposite.
    """

    def __init__(
        self, out: Post, back: Mailbox, first: bool, check: Callable[[], None] = lambda: None
    ) -> None:
        """``check`` is called while waiting and raises if this process should stop."""
        self._out, self._back, self._check = out, back, check
        self._lost = ""
        self.first = first

    def together(self, step: Callable[[], bytes] = bytes, timeout: float = ANSWER_TIMEOUT) -> bytes:
        """Do ``step`` on both sides; returns what it gave on the other.

        Raises ResourceError, on both sides, if it failed on either, and PeerLost if the other side
        does not get there within ``timeout`` seconds, or did not before.
        """
        if self._lost:
            raise PeerLost(self._lost)
        failure, result = "", b""
        try:
            result = step()
        except (SsdPipeError, RuntimeError, OSError) as error:
            failure = (" ".join(str(error).split()) or type(error).__name__)[:_LONGEST]
        self._out.send(msgspec.msgpack.encode((failure, result)))
        theirs, answer = msgspec.msgpack.decode(self._receive(timeout), type=tuple[str, bytes])
        if failure or theirs:
            raise ResourceError(failure or f"other side: {theirs}")
        return answer

    def both(self, step: Callable[[], None]) -> None:
        """``together`` of a step that gives nothing."""

        def act() -> bytes:
            step()
            return b""

        self.together(act)

    def _receive(self, timeout: float) -> bytes:
        clock = RunningTime(_TURN)
        while (left := timeout - clock.read()) > 0:
            self._check()
            message = self._back.recv(min(left, _TURN))
            if message is not None:
                return message
        self._lost = f"the other process did not answer within {timeout:g} s"
        raise PeerLost(self._lost)
