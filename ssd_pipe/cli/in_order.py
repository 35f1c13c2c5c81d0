"""Several answers, asked for at once, as one stream of whole answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from ipc.messages.client import Chunk
from ssd_pipe.cli.talk import AnswerStream
from ssd_pipe.errors import RequestError

LINE_FULL = 429


@dataclass(slots=True, eq=False)
class _Prompt:
    """One prompt and what has come of it.

    Attributes:
        held: chunks of each answer that were not handed on yet.
        left: answers that have not ended.
        stream, chunks: while it is under way.
        told: whether a chunk was handed on.
        error: what ended it, raised when its turn comes.
    """

    submit: Callable[[], AnswerStream]
    held: list[deque[Chunk]]
    left: int
    stream: AnswerStream | None = None
    chunks: Iterator[Chunk] = field(default_factory=lambda: iter(()))
    told: bool = False
    error: RequestError | None = None


class InOrder:
    """Answers to several prompts, one whole answer after the other; later ones are held back.

    An iterator, whose ``next`` may be interrupted and called again. Prompts for which the server's
    waiting line is full are submitted again once those under way are answered. If not one was
    answered since they were last submitted, the refusal (RequestError 429) is raised.

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
        self._answers = answers
        self._ahead = ahead
        self._prompts = deque(_Prompt(submit, self._nothing(), answers) for submit in submits)
        self._index = 0  # of the answer whose turn it is
        self._refusal: RequestError | None = None  # since prompts were last submitted
        self._answered = False  # a prompt, since those refused were last submitted

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        while self._prompts and not self._prompts[0].held[self._index]:
            self._submit()
            self._read()
        if not self._prompts:
            raise StopIteration
        prompt = self._prompts[0]
        chunk = prompt.held[self._index].popleft()
        prompt.told = True
        if chunk.finish_reason is not None:
            self._index += 1
            if self._index == self._answers:
                self._index = 0
                self._prompts.popleft()
        return chunk

    def cancel(self) -> None:
        """Ask for the end of all answers; what is under way then ends with "cancelled"."""
        self.cancelled = True
        for prompt in self._prompts:
            if prompt.stream is not None:
                prompt.stream.cancel()

    def _submit(self) -> None:
        """All that may be under way and are not; after a refusal, only once nothing is."""
        if self.cancelled:
            return
        window = list(islice(self._prompts, self._ahead))
        if self._refusal is not None:
            if any(prompt.stream is not None for prompt in window):
                return
            if not self._answered:
                raise self._refusal
            self._refusal, self._answered = None, False
        for prompt in window:
            if prompt.stream is None and prompt.left and prompt.error is None:
                stream = prompt.submit()
                prompt.stream, prompt.chunks = stream, iter(stream)

    def _read(self) -> None:
        """The next chunk of the first prompt under way. Raises StopIteration after a cancel if
        the one whose turn it is was not submitted."""
        head = self._prompts[0]
        if head.error is not None:
            raise head.error
        if self.cancelled and head.stream is None:
            raise StopIteration
        prompt = next(each for each in self._prompts if each.stream is not None)
        try:
            chunk = next(prompt.chunks)
        except RequestError as error:
            prompt.stream = None
            if error.code == LINE_FULL and not prompt.told:
                prompt.held, prompt.left = self._nothing(), self._answers
                self._refusal = error
            else:
                prompt.error = error
            return
        prompt.held[chunk.index].append(chunk)
        if chunk.finish_reason is not None:
            prompt.left -= 1
            if not prompt.left:
                prompt.stream = None
                self._answered = True

    def _nothing(self) -> list[deque[Chunk]]:
        return [deque() for _ in range(self._answers)]
