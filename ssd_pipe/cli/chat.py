"""``ssd-pipe chat``: talk with a running pipeline, or with any OpenAI-compatible server."""

from __future__ import annotations

import os
import re
import sys
from contextlib import AbstractContextManager
from typing import Annotated, Any, Protocol
from urllib.parse import urlsplit

import typer

from ipc.curve import is_exposed
from ipc.messages.client import ChatMessage
from ssd_pipe.cli.connect import Place, place_options
from ssd_pipe.cli.line_input import check_input, read_message
from ssd_pipe.cli.options import Sampling, sampling_options
from ssd_pipe.cli.speculation import coloured, colours_wanted, legend
from ssd_pipe.cli.talk import (
    AnswerStream,
    Metrics,
    System,
    TemplateKwargs,
    parse_variables,
    print_metrics,
    show,
)
from ssd_pipe.errors import ConfigError, RequestError
from ssd_pipe.params import SamplingParams

COMMANDS = """\
/reset          forget the conversation, keep the system message (/clear is the same)
/system [TEXT]  set the system message from the next turn on; alone: show it
/exit           leave, as the end of input does (/quit is the same)
\"\"\"             opens a message of several lines, another one ends it; or end lines with \\"""


class Server(Protocol):
    """Who answers: a pipeline's client, or an OpenAIServer."""

    def chat(
        self,
        messages: list[ChatMessage],
        params: SamplingParams,
        *,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> AnswerStream:
        """Stream the answer to a conversation."""


@sampling_options
@place_options
def chat(
    sampling: Sampling,
    place: Place,
    system: System = "",
    template_kwargs: TemplateKwargs = None,
    metrics: Metrics = False,
    show_speculation: Annotated[
        bool,
        typer.Option("--show-speculation", help="colour accepted, recovery and bonus tokens"),
    ] = False,
    url: Annotated[
        str, typer.Option("--url", help="an OpenAI-compatible server: http://HOST:PORT/v1")
    ] = "",
    model: Annotated[
        str, typer.Option("--model", help="its model; none = the first it lists")
    ] = "",
    api_key: Annotated[
        str, typer.Option("--api-key", help="its key; or OPENAI_API_KEY, here also SSD_API_KEY")
    ] = "",
) -> None:
    """Talk with a running pipeline. Ctrl-C stops an answer; /help lists the commands."""
    if url and place:
        raise ConfigError("--url", "names a server, --run, --endpoint and --shm-dir a pipeline")
    if url and show_speculation:
        raise ConfigError("--show-speculation", "a server at --url does not tell; use --run")
    if not url and (model or api_key):
        raise ConfigError("--model" if model else "--api-key", "is for a server at --url")
    check_input()
    variables = parse_variables(template_kwargs)
    colours = show_speculation and colours_wanted()
    if colours:
        print(legend(), file=sys.stderr)
    with _server(place, url, model, api_key, sampling.limited) as server:
        Conversation(server, sampling.params, system, variables, metrics, colours).run()


def _server(
    place: Place, url: str, model: str, api_key: str, limited: bool
) -> AbstractContextManager[Server]:
    if not url:
        return place.connect()
    from ssd_pipe.openai_server import OpenAIServer

    # A server refuses a limit that the context has no room for, where a pipeline cuts it.
    return OpenAIServer(url, model, api_key or key_for(url), limited)


def key_for(url: str) -> str:
    """The key in the environment. That of this machine's gateways is shown to no other server."""
    if key := os.environ.get("OPENAI_API_KEY"):
        return key
    try:
        host = urlsplit(url).hostname
    except ValueError:
        host = None
    local = host is not None and not is_exposed(f"tcp://{host}:0")
    return os.environ.get("SSD_API_KEY", "") if local else ""


class Conversation:
    """The turns so far and how answers are shown."""

    def __init__(
        self,
        server: Server,
        params: SamplingParams,
        system: str,
        variables: dict[str, Any] | None,
        metrics: bool,
        colours: bool,
    ) -> None:
        self._server = server
        self._params = params
        self._system = system
        self._variables = variables
        self._metrics = metrics
        self._paint = coloured if colours else None
        self._turns: list[ChatMessage] = []

    def run(self) -> None:
        """Until the user leaves. Raises PeerLost if the server goes away."""
        while (said := read_message()) is not None:
            name, _, rest = said.partition(" ")
            if name in ("/exit", "/quit"):
                return
            if name in ("/reset", "/clear"):
                self._turns = []
            elif name == "/system":
                self._set_system(rest.strip())
            elif name == "/help":
                print(COMMANDS)
            elif re.fullmatch(r"/[a-z]+", said):
                print(f"error: no command {said}; /help lists them", file=sys.stderr)
            elif said:
                self._ask(said)

    def _set_system(self, text: str) -> None:
        if text:
            self._system = text
        else:
            print(self._system or "(no system message)")

    def _ask(self, said: str) -> None:
        turns = [*self._turns, ChatMessage("user", said)]
        opening = [ChatMessage("system", self._system)] if self._system else []
        answer: list[str] = []
        try:
            stream = self._server.chat(
                [*opening, *turns], self._params, chat_template_kwargs=self._variables
            )
            _, numbers = show(stream, answer, self._paint)
        except RequestError as error:
            print(f"error: {error}", file=sys.stderr)
            return
        except (
            KeyboardInterrupt
        ):  # before there was an answer, or again after its end was asked for
            print()
            return
        if self._metrics and numbers is not None:
            print_metrics(numbers)
        if text := "".join(answer):
            self._turns = [*turns, ChatMessage("assistant", text)]
