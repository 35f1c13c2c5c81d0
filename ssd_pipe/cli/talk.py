"""``ssd-pipe generate`` and ``chat``: a terminal's end of a running pipeline."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from ipc.messages import ChatMessage, RequestMetrics
from ssd_pipe.cli.connect import connect
from ssd_pipe.cli.options import Endpoint, RunName, ShmDir, sampling_options
from ssd_pipe.errors import RequestError, SsdPipeError
from ssd_pipe.params import SamplingParams

if TYPE_CHECKING:
    from ssd_pipe.client import Client, Stream

INTERRUPTED_STATUS = 130
Metrics = Annotated[bool, typer.Option("--metrics", help="print the request's numbers after it")]
System = Annotated[str, typer.Option("--system", help="system message before the first turn")]


@sampling_options
def generate(
    params: SamplingParams,
    prompt: Annotated[str, typer.Argument(help="what to ask; - reads standard input")],
    run: RunName = "",
    endpoint: Endpoint = "",
    shm_dir: ShmDir = "",
    system: System = "",
    raw: Annotated[bool, typer.Option("--raw", help="continue the text, no chat template")] = False,
    metrics: Metrics = False,
) -> int:
    """Answer one prompt with a running pipeline; Ctrl-C cancels the answer."""
    text = sys.stdin.read() if prompt == "-" else prompt
    with connect(run, endpoint, shm_dir) as client:
        messages = _opening(system, text)
        stream = client.stream(text, params) if raw else client.chat(messages, params)
        finish, numbers = show(stream)
    if metrics and numbers is not None:
        print_metrics(numbers)
    return INTERRUPTED_STATUS if finish == "cancelled" else 0


@sampling_options
def chat(
    params: SamplingParams,
    run: RunName = "",
    endpoint: Endpoint = "",
    shm_dir: ShmDir = "",
    system: System = "",
    metrics: Metrics = False,
) -> None:
    """Talk with a running pipeline. Ctrl-C cancels an answer; /clear forgets, /exit leaves."""
    history = _opening(system)
    with connect(run, endpoint, shm_dir) as client:
        while (line := _read_line()) is not None:
            if line == "/exit":
                break
            if line == "/clear":
                history = _opening(system)
                continue
            if not line:
                continue
            history = _turn(client, [*history, ChatMessage("user", line)], params, metrics)


def _turn(
    client: Client, history: list[ChatMessage], params: SamplingParams, metrics: bool
) -> list[ChatMessage]:
    """Ask with ``history``, show the answer; returns the history with what is kept of it."""
    said: list[str] = []
    try:
        _, numbers = show(client.chat(history, params), said)
    except RequestError as error:
        print(f"error: {error}", file=sys.stderr)
        return history[:-1]
    if metrics and numbers is not None:
        print_metrics(numbers)
    return [*history, ChatMessage("assistant", "".join(said))]


def show(stream: Stream, said: list[str] | None = None) -> tuple[str, RequestMetrics | None]:
    """Print an answer as it comes; Ctrl-C cancels it, a second one leaves the program.

    Args:
        stream: the answer.
        said: gets the pieces of text.

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
        sys.stdout.write(chunk.text)
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
    print(" | ".join(parts), file=sys.stderr)


def _opening(system: str, text: str = "") -> list[ChatMessage]:
    turns = (("system", system), ("user", text))
    return [ChatMessage(role, content) for role, content in turns if content]


def _read_line() -> str | None:
    """The user's next line, None at the end of input; Ctrl-C drops the line."""
    if sys.stdin.isatty():
        import readline  # noqa: F401  (gives input() editing and history)
    while True:
        try:
            return input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            print()
