"""How a terminal shows an answer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Annotated, Protocol

import typer

from ipc.messages.client import Chunk, RequestMetrics
from ssd_pipe.errors import SsdPipeError

Metrics = Annotated[bool, typer.Option("--metrics", help="print the request's numbers after it")]


class AnswerStream(Protocol):
    """What a stream of either kind of server can do."""

    def __iter__(self) -> Iterator[Chunk]:
        """Chunks as they come."""

    def cancel(self) -> None:
        """Ask for the end; the last chunk then says "cancelled"."""


def show(
    stream: AnswerStream,
    said: list[str] | None = None,
    paint: Callable[[Chunk], str] | None = None,
) -> tuple[str, RequestMetrics | None]:
    """Print an answer as it comes; interrupts as in ``follow``.

    Args:
        stream: the answer.
        said: gets the pieces of text.
        paint: what to print of a chunk; None prints its text.

    Returns:
        The finish reason and the request's numbers.
    """
    line_open = False

    def write(chunk: Chunk) -> None:
        nonlocal line_open
        text = chunk.text if paint is None else paint(chunk)
        sys.stdout.write(text)
        sys.stdout.flush()
        line_open = not text.endswith("\n") if text else line_open
        if said is not None:
            said.append(chunk.text)

    try:
        ended = follow(stream, write)
    except SsdPipeError:
        if line_open:
            print(flush=True)
        raise
    print(flush=True)
    return ended


def follow(
    stream: AnswerStream, take: Callable[[Chunk], object]
) -> tuple[str, RequestMetrics | None]:
    """Hand the chunks of one answer to ``take``; returns its finish reason and numbers.

    Ctrl-C cancels the answer, a second one leaves the program.
    """
    finish, numbers, interrupted = "", None, False
    chunks = iter(stream)
    while not finish:
        try:
            chunk = next(chunks, None)
        except KeyboardInterrupt:
            if interrupted:
                raise
            interrupted = True
            stream.cancel()
            continue
        if chunk is None:
            break
        take(chunk)
        finish, numbers = chunk.finish_reason or "", chunk.metrics
    return finish, numbers


def print_metrics(numbers: RequestMetrics, finish: str) -> None:
    """One line on stderr: why an answer ended, and the request's numbers."""
    parts = [
        f"[{finish}] {numbers.prompt_tokens} prompt + {numbers.output_tokens} output tokens",
        f"{numbers.decode_rate:.1f} tok/s",
        f"first token after {numbers.time_to_first_token * 1e3:.0f} ms",
    ]
    if numbers.hit_rate is not None:
        parts.append(f"cache hit rate {numbers.hit_rate:.2f}")
    if numbers.accepted_mean is not None:
        parts.append(f"mean accepted length {numbers.accepted_mean:.2f}")
    if numbers.synthetic:
        parts.append("SYNTHETIC ACCEPTANCE")
    print(" | ".join(parts), file=sys.stderr)
