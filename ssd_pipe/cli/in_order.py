"""Several answers, asked for at once, as one stream of whole answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from ipc.messages.client import Chunk
from ssd_pipe.cli.talk import AnswerStream


class InOrder:
    """Answers to several prompts, one whole answer after the other; later ones are held back.

    An iterator, whose ``next`` may be interrupted and called again.

    Args:
        submits: one for each prompt, in order; submits it.
        answers: to each prompt.
        ahead: prompts submitted before the first of them is answered, at most.

    Attributes:
        cancelled: whether ``cancel`` was called. What was not submitted then never will be.
    """

    def __init__(
        self, submits: Iterable[Callable[[], AnswerStream]], answers: int, ahead: int
    ) -> None:
        self.cancelled = False
        self._waiting = deque(submits)
        self._ahead = ahead
        self._streams: deque[AnswerStream] = deque()
        self._chunks: deque[Iterator[Chunk]] = deque()
        self._held: list[deque[Chunk]] = [deque() for _ in range(answers)]
        self._index = 0  # of the answer whose turn it is

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        while not self._held[self._index]:
            while self._waiting and len(self._streams) < self._ahead:
                stream = self._waiting[0]()
                self._waiting.popleft()
                self._streams.append(stream)
                self._chunks.append(iter(stream))
            if not self._streams:
                raise StopIteration
            chunk = next(self._chunks[0])
            self._held[chunk.index].append(chunk)
        chunk = self._held[self._index].popleft()
        if chunk.finish_reason is not None:
            self._index += 1
            if self._index == len(self._held):
                self._index = 0
                self._streams.popleft()
                self._chunks.popleft()
        return chunk

    def cancel(self) -> None:
        """Ask for the end of all answers; what is under way then ends with "cancelled"."""
        self.cancelled = True
        self._waiting.clear()
        for stream in self._streams:
            stream.cancel()
