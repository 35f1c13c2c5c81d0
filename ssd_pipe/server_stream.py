"""The answers of an OpenAI-compatible server to one request, in the shape of ``client.Stream``."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator

import httpx

from ipc.messages.client import Chunk, RequestMetrics
from ssd_pipe.errors import PeerLost
from ssd_pipe.openai_api import Event, Said, Usage, events


class ServerChunk(Chunk, frozen=True, kw_only=True):
    """A chunk of a server's. ``reasoning``: what the model thought, which is none of the text."""

    reasoning: str = ""


class ServerStream:
    """Chunks of ``answers`` answers; iterating raises RequestError or PeerLost if it breaks off.

    The last chunk of all has metrics if the server told how many tokens there were, which it
    counts for all answers together. Times are measured here, the network included; hits and
    acceptance are not known.
    """

    def __init__(self, response: httpx.Response, asked: float, answers: int = 1) -> None:
        self._response = response
        self._events = events(response, answers)
        self._asked = asked
        self._first = self._last = 0.0
        self._usage: Usage | None = None
        self._finish = [""] * answers
        self._open = set(range(answers))
        self._silent = set(range(answers))  # no event was of these yet
        self._ready: deque[ServerChunk] = deque()
        self._done = False
        self._cancelled = False

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        while not self._ready:
            if self._done:
                raise StopIteration
            if self._cancelled:
                self._end("cancelled")
            elif (event := self._event()) is None:
                self._check_all_came()
                self._end("stop")
            else:
                self._take(event)
        return self._ready.popleft()

    def cancel(self) -> None:
        """End the answers; the last chunk of each that is not complete says "cancelled"."""
        self._cancelled = True

    def _event(self) -> Event | None:
        """The next one, None at the end."""
        try:
            return next(self._events, None)
        except BaseException:
            self._close()
            raise

    def _check_all_came(self) -> None:
        if self._silent:
            self._close()
            count = len(self._finish)
            told = f"gave {count - len(self._silent)} of the {count} answers it was asked for"
            raise PeerLost(f"{self._response.url}: the server {told}")

    def _take(self, event: Event) -> None:
        self._usage = event.usage or self._usage
        for choice in event.choices or ():
            index = choice.index or 0
            if index not in self._open:
                continue
            self._silent.discard(index)
            said = choice.delta or Said()
            text = said.content or choice.text or ""
            reasoning = said.reasoning_content or said.reasoning or ""
            if text or reasoning:
                self._last = time.monotonic()
                self._first = self._first or self._last
                self._ready.append(ServerChunk(id="", text=text, reasoning=reasoning, index=index))
            self._finish[index] = choice.finish_reason or self._finish[index]
            # The last one waits for the usage, which comes after it.
            if self._finish[index] and len(self._open) > 1:
                self._open.discard(index)
                reason = self._finish[index]
                self._ready.append(ServerChunk(id="", index=index, finish_reason=reason))

    def _end(self, reason: str) -> None:
        self._close()
        *others, last = sorted(self._open)
        for index in (*others, last):
            self._ready.append(
                ServerChunk(
                    id="",
                    index=index,
                    finish_reason=self._finish[index] or reason,
                    metrics=self._metrics() if index == last else None,
                )
            )
        self._open.clear()

    def _close(self) -> None:
        self._done = True
        self._response.close()

    def _metrics(self) -> RequestMetrics | None:
        used = self._usage
        if used is None or not used.completion_tokens:
            return None
        first, last = self._first or time.monotonic(), self._last
        decoding = last - first
        return RequestMetrics(
            prompt_tokens=used.prompt_tokens or 0,
            output_tokens=used.completion_tokens,
            queue_time=0.0,
            time_to_first_token=first - self._asked,
            total_time=time.monotonic() - self._asked,
            decode_rate=(used.completion_tokens - 1) / decoding if decoding > 0 else 0.0,
        )
