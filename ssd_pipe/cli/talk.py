"""``ssd-pipe generate``, and how a terminal shows an answer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Annotated, Protocol

import typer

from ipc.messages.client import ChatMessage, Chunk, RequestMetrics
from ssd_pipe.cli.connect import Place, place_options
from ssd_pipe.cli.options import Sampling, sampling_options
from ssd_pipe.cli.statuses import INTERRUPTED_STATUS
from ssd_pipe.errors import SsdPipeError

Metrics = Annotated[bool, typer.Option("--metrics", help="print the request's numbers after it")]
System = Annotated[str, typer.Option("--system", help="system message before the first turn")]


class AnswerStream(Protocol):
    """What a stream of either kind of server can do."""

    def __iter__(self) -> Iterator[Chunk]:
        """Chunks as they come."""

    def cancel(self) -> None:
        """Ask for the end; the last chunk then says "cancelled"."""


@sampling_options
@place_options
def generate(
    sampling: Sampling,
    place: Place,
    prompt: Annotated[str, typer.Argument(help="what to ask; - reads standard input")],
    system: System = "",
    raw: Annotated[bool, typer.Option("--raw", help="continue the text, no chat template")] = False,
    metrics: Metrics = False,
) -> int:
    """Answer one prompt with a running pipeline; Ctrl-C cancels the answer."""
    text = sys.stdin.read() if prompt == "-" else prompt
    with place.connect() as client:
        messages = _opening(system, text)
        params = sampling.params
        stream = client.stream(text, params) if raw else client.chat(messages, params)
        finish, numbers = show(stream)
    if metrics and numbers is not None:
        print_metrics(numbers)
    return INTERRUPTED_STATUS if finish == "cancelled" else 0


def show(
    stream: AnswerStream,
    said: list[str] | None = None,
    paint: Callable[[Chunk], str] | None = None,
) -> tuple[str, RequestMetrics | None]:
    """Print an answer as it comes; Ctrl-C cancels it, a second one leaves the program.

    Args:
        stream: the answer.
        said: gets the pieces of text.
        paint: what to print of a chunk; None prints its text.

    Returns:
        The finish reason and the request's numbers.
    """
    finish, numbers, interrupted, line_open = "", None, False, False
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
        except SsdPipeError:
            if line_open:
                print(flush=True)
            raise
        if chunk is None:
            break
        sys.stdout.write(chunk.text if paint is None else paint(chunk))
        sys.stdout.flush()
        line_open = not chunk.text.endswith("\n") if chunk.text else line_open
        if said is not None:
            said.append(chunk.text)
        finish, numbers = chunk.finish_reason or "", chunk.metrics
    print(flush=True)
    return finish, numbers


def print_metrics(numbers: RequestMetrics) -> None:
    """One line of a request's numbers on stderr."""
    parts = [
        f"{numbers.prompt_tokens} prompt + {numbers.output_tokens} output tokens",
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


def _opening(system: str, text: str = "") -> list[ChatMessage]:
    turns = (("system", system), ("user", text))
    return [ChatMessage(role, content) for role, content in turns if content]
