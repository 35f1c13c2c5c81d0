"""The answers of an OpenAI-compatible server to one request, in the shape of ``client.Stream``."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec

from ipc.messages.client import Chunk, RequestMetrics
from ssd_pipe.errors import PeerLost, RequestError

_REASONING = ("reasoning_content", "reasoning")  # the second one is newer vLLM's and Ollama's


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
        self._lines = _lines(response)
        self._asked = asked
        self._first = self._last = 0.0
        self._usage: dict[str, int] = {}
        self._finish = [""] * answers
        self._open = set(range(answers))
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
                self._end("stop")
            elif "error" in event:
                self._close()
                raise refusal(event, 503, "the answer broke off")
            else:
                self._take(event)
        return self._ready.popleft()

    def cancel(self) -> None:
        """End the answers; the last chunk of each that is not complete says "cancelled"."""
        self._cancelled = True

    def _event(self) -> dict[str, Any] | None:
        """The next server-sent event's object, None at the end."""
        try:
            for line in self._lines:
                if not line.startswith(b"data:"):
                    continue
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return None
                return msgspec.json.decode(data, type=dict[str, Any])
        except httpx.HTTPError as error:
            self._close()
            raise PeerLost(f"{self._response.url}: the answer broke off: {error}") from None
        except msgspec.DecodeError as error:
            self._close()
            raise PeerLost(f"{self._response.url}: unreadable answer: {error}") from None
        if all(self._finish):
            return None
        self._close()
        raise PeerLost(f"{self._response.url}: the answer broke off")

    def _take(self, event: dict[str, Any]) -> None:
        self._usage = event.get("usage") or self._usage
        for choice in event.get("choices") or ():
            index = choice.get("index") or 0
            if index not in self._open:
                continue
            said = choice.get("delta") or {}
            text = said.get("content") or choice.get("text") or ""
            reasoning = next((said[name] for name in _REASONING if said.get(name)), "")
            if text or reasoning:
                self._last = time.monotonic()
                self._first = self._first or self._last
                self._ready.append(ServerChunk(id="", text=text, reasoning=reasoning, index=index))
            self._finish[index] = choice.get("finish_reason") or self._finish[index]
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
        tokens = self._usage.get("completion_tokens", 0)
        if not tokens:
            return None
        first, last = self._first or time.monotonic(), self._last
        decoding = last - first
        return RequestMetrics(
            prompt_tokens=self._usage.get("prompt_tokens", 0),
            output_tokens=tokens,
            queue_time=0.0,
            time_to_first_token=first - self._asked,
            total_time=time.monotonic() - self._asked,
            decode_rate=(tokens - 1) / decoding if decoding > 0 else 0.0,
        )


def _lines(response: httpx.Response) -> Iterator[bytes]:
    """Lines of a stream of events, which may hold any character but these line ends.

    (httpx's own lines also end at U+2028 and its like.)
    """
    rest = b""
    for data in response.iter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        yield from lines
    yield rest


def refusal(told: Any, status: int, fallback: str) -> RequestError:
    """The server's error object, or what its status says."""
    error = told.get("error") if isinstance(told, dict) else None
    message = error.get("message") if isinstance(error, dict) else error or fallback
    return RequestError(status, f"the server answered: {message}")
