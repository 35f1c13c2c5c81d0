"""An answer's stream that follows a script."""

from __future__ import annotations

from ipc.messages.client import Chunk


class Scripted:
    """A stream whose next() gives chunks, raises errors; keeps how often it was cancelled."""

    def __init__(self, *steps: Chunk | BaseException) -> None:
        self._steps = iter(steps)
        self.cancelled = 0

    def __iter__(self) -> Scripted:
        return self

    def __next__(self) -> Chunk:
        step = next(self._steps)
        if isinstance(step, BaseException):
            raise step
        return step

    def cancel(self) -> None:
        self.cancelled += 1
