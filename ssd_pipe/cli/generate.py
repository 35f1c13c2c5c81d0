"""``ssd-pipe generate``: one prompt or several, answered on the terminal or as JSON."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from ipc.messages.client import ChatMessage, Chunk, RequestMetrics
from ssd_pipe.cli.in_order import InOrder
from ssd_pipe.cli.options import Sampling, sampling_options
from ssd_pipe.cli.prompts import (
    Given,
    System,
    TemplateKwargs,
    check_unicode,
    parse_variables,
    read_prompts,
)
from ssd_pipe.cli.server_choice import Server, ServerChoice, server_options
from ssd_pipe.cli.statuses import INTERRUPTED_STATUS
from ssd_pipe.cli.talk import AnswerStream, Metrics, follow, print_metrics, show
from ssd_pipe.cli.thinking import painter
from ssd_pipe.errors import ConfigError, RequestError
from ssd_pipe.params import SamplingParams, checked

AHEAD = 64  # answers a pipeline is asked for at once
OF_SERVERS = (
    "prompt_tokens",
    "output_tokens",
    "time_to_first_token",
    "total_time",
    "decode_rate",
)
"""The fields of RequestMetrics that are known of any server's answer."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One answer as ``--json`` prints it; ``metrics`` are RequestMetrics.

    ``prompt_index`` and ``index`` count from 0. Of a server at --url there are no ``token_ids``,
    and fewer metrics (OF_SERVERS): those of all answers to a prompt, at the one that ended last.
    """

    prompt_index: int
    index: int
    text: str
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    finish_reason: str
    metrics: dict[str, Any] | None


@sampling_options
@server_options
def generate(
    sampling: Sampling,
    server: ServerChoice,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROMPT",
            help="what to ask, one answer to each; none or - reads standard input",
            show_default=False,
        ),
    ] = None,
    files: Annotated[
        list[Path] | None,
        typer.Option("--file", "-f", help="read a prompt from this file; repeatable"),
    ] = None,
    system: System = "",
    raw: Annotated[bool, typer.Option("--raw", help="continue the text, no chat template")] = False,
    template_kwargs: TemplateKwargs = None,
    n: Annotated[int, typer.Option("--n", "-n", help="answers to each prompt")] = 1,
    as_json: Annotated[
        bool, typer.Option("--json", help="a line of JSON for each answer, when it is complete")
    ] = False,
    metrics: Metrics = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="no headings, and not why an answer ended")
    ] = False,
) -> int:
    """Answer prompts with a running pipeline or a server; Ctrl-C cancels."""
    server.check()
    if raw:
        for flag, given in (("--system", system), ("--chat-template-kwargs", template_kwargs)):
            if given:
                raise ConfigError(flag, "is for a chat template, and --raw uses none")
    if quiet and metrics:
        raise ConfigError("--quiet", "leaves out what --metrics asks for")
    check_unicode("--system", system)
    texts = read_prompts(prompts or (), files or ())
    variables = parse_variables(template_kwargs)
    params = _several(sampling.params, n)

    def submit(client: Server, text: str) -> AnswerStream:
        if raw:
            return client.stream(text, params)
        return client.chat(_opening(system, text), params, chat_template_kwargs=variables)

    with server.connect(sampling.limited) as client:
        # What a server says is measured as it is read: one prompt after the other.
        ahead = 1 if server.url else max(1, AHEAD // n)
        stream = InOrder([partial(submit, client, each.text) for each in texts], n, ahead)
        for prompt_index, each in enumerate(texts):
            for index in range(n):
                if as_json:
                    finish, numbers = _print_json(stream, prompt_index, index, bool(server.url))
                else:
                    if len(texts) * n > 1 and not quiet:
                        _print_heading(each, index, n, first=not (prompt_index or index))
                    finish, numbers = show(stream, paint=painter())
                if metrics and numbers is not None:
                    print_metrics(numbers, finish)
                elif finish and not quiet and not as_json and sys.stderr.isatty():
                    print(f"[{finish}]", file=sys.stderr)
                if stream.cancelled:
                    return INTERRUPTED_STATUS
    return 0


def _several(params: SamplingParams, n: int) -> SamplingParams:
    try:
        return checked(params, {"n": n})
    except RequestError as error:
        raise ConfigError("--n", str(error).removeprefix("n: ")) from None


def _opening(system: str, text: str) -> list[ChatMessage]:
    turns = (("system", system), ("user", text))
    return [ChatMessage(role, content) for role, content in turns if content]


def _print_heading(prompt: Given, index: int, n: int, first: bool) -> None:
    """As head and tail do before each of several files."""
    number = f" ({index + 1} of {n})" if n > 1 else ""
    print(f"{'' if first else chr(10)}==> {prompt.title}{number} <==", flush=True)


def _print_json(
    stream: AnswerStream, prompt_index: int, index: int, remote: bool
) -> tuple[str, RequestMetrics | None]:
    """Print one answer when it is complete; returns its finish reason and numbers."""
    chunks: list[Chunk] = []
    finish, numbers = follow(stream, chunks.append)
    if finish:
        known = None if numbers is None else msgspec.structs.asdict(numbers)
        if known is not None and remote:
            known = {name: known[name] for name in OF_SERVERS}
        reasoning = "".join(getattr(chunk, "reasoning", "") for chunk in chunks)
        answer = Answer(
            prompt_index=prompt_index,
            index=index,
            text="".join(chunk.text for chunk in chunks),
            reasoning_content=reasoning or msgspec.UNSET,
            token_ids=msgspec.UNSET if remote else [i for c in chunks for i in c.token_ids],
            finish_reason=finish,
            metrics=known,
        )
        print(msgspec.json.encode(answer).decode(), flush=True)
    return finish, numbers
