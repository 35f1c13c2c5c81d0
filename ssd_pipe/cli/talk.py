"""``ssd-pipe generate``, and how a terminal shows an answer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Protocol

import msgspec
import typer

from ipc.messages.client import ChatMessage, Chunk, RequestMetrics
from ssd_pipe.cli.connect import Place, place_options
from ssd_pipe.cli.options import Sampling, sampling_options
from ssd_pipe.cli.statuses import INTERRUPTED_STATUS
from ssd_pipe.errors import ConfigError, SsdPipeError

Metrics = Annotated[bool, typer.Option("--metrics", help="print the request's numbers after it")]
System = Annotated[str, typer.Option("--system", help="system message before the first turn")]
TemplateKwargs = Annotated[
    str | None,
    typer.Option(
        "--chat-template-kwargs",
        metavar="JSON",
        help='variables of the chat template: {"enable_thinking": false}',
    ),
]


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
    prompt: Annotated[
        str | None,
        typer.Argument(help="what to ask; none or - reads standard input", show_default=False),
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="read the prompt from this file")
    ] = None,
    system: System = "",
    raw: Annotated[bool, typer.Option("--raw", help="continue the text, no chat template")] = False,
    template_kwargs: TemplateKwargs = None,
    metrics: Metrics = False,
) -> int:
    """Answer one prompt with a running pipeline; Ctrl-C cancels the answer."""
    if raw:
        for flag, given in (("--system", system), ("--chat-template-kwargs", template_kwargs)):
            if given:
                raise ConfigError(flag, "is for a chat template, and --raw uses none")
    text = read_prompt(prompt, file)
    variables = parse_variables(template_kwargs)
    params = sampling.params
    with place.connect() as client:
        stream = (
            client.stream(text, params)
            if raw
            else client.chat(_opening(system, text), params, chat_template_kwargs=variables)
        )
        finish, numbers = show(stream)
    if metrics and numbers is not None:
        print_metrics(numbers)
    return INTERRUPTED_STATUS if finish == "cancelled" else 0


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The text to answer: ``prompt``, or if that is None or - what a file or standard input holds,
    in UTF-8, but for the newline at its end. Raises ConfigError."""
    if file is not None and prompt is not None:
        raise ConfigError("--file", "is instead of a prompt on the command line, not besides one")
    # Python has no sys.stdin where it was closed (``<&-``).
    unread = prompt in (None, "-") if sys.stdin is None else prompt is None and sys.stdin.isatty()
    if file is None and unread:
        raise ConfigError("PROMPT", "none is given; write one, pipe one in, or name a --file")
    where = "--file" if file is not None else "PROMPT"
    try:
        if file is not None:
            text = file.read_bytes().decode().removesuffix("\n")
        elif prompt in (None, "-"):
            text = sys.stdin.buffer.read().decode().removesuffix("\n")
        else:
            text = prompt or ""
    except OSError as error:
        raise ConfigError(where, f"{error.filename}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(where, f"is not UTF-8: {error}") from None
    if not text:
        raise ConfigError(where, "is empty")
    return text


def parse_variables(text: str | None) -> dict[str, Any] | None:
    """What ``--chat-template-kwargs`` says. Raises ConfigError."""
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError) as error:
        reason = f'must be a JSON object, as {{"enable_thinking": false}}: {error}'
        raise ConfigError("--chat-template-kwargs", reason) from None


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
