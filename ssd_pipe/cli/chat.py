"""``ssd-pipe chat``: talk with a running pipeline, or with any OpenAI-compatible server."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from ipc.messages.client import ChatMessage
from ssd_pipe.cli.line_input import check_input, read_message
from ssd_pipe.cli.options import Sampling, sampling_options
from ssd_pipe.cli.prompts import System, TemplateKwargs, check_unicode, parse_variables
from ssd_pipe.cli.server_choice import Server, ServerChoice, server_options
from ssd_pipe.cli.speculation import coloured, colours_wanted, legend
from ssd_pipe.cli.statuses import FAILED_STATUS
from ssd_pipe.cli.talk import Metrics, print_metrics, show
from ssd_pipe.cli.thinking import Paint, painter
from ssd_pipe.errors import ConfigError, RequestError
from ssd_pipe.params import SamplingParams

COMMANDS = """\
/reset          forget the conversation, keep the system message (/clear is the same)
/system [TEXT]  set the system message from the next turn on; alone: show it
/exit           leave, as the end of input does (/quit is the same)
\"\"\"             opens a message of several lines, another one ends it; or end lines with \\"""


@sampling_options
@server_options
def chat(
    sampling: Sampling,
    server: ServerChoice,
    system: System = "",
    template_kwargs: TemplateKwargs = None,
    metrics: Metrics = False,
    show_speculation: Annotated[
        bool,
        typer.Option("--show-speculation", help="colour accepted, recovery and bonus tokens"),
    ] = False,
) -> int:
    """Talk with a running pipeline. Ctrl-C stops an answer; /help lists the commands."""
    server.check()
    if server.url and show_speculation:
        raise ConfigError("--show-speculation", "a server at --url does not tell; use --run")
    check_input()
    check_unicode("--system", system)
    variables = parse_variables(template_kwargs)
    colours = show_speculation and colours_wanted()
    if colours:
        print(legend(), file=sys.stderr)
    with server.connect(sampling.limited) as client:
        painting = _colouring if colours else painter
        talk = Conversation(client, sampling.params, system, variables, metrics, painting)
        talk.run()
    # Whoever pipes messages in reads no errors in between.
    return FAILED_STATUS if talk.refused and not sys.stdin.isatty() else 0


def _colouring() -> Paint:
    return coloured


class Conversation:
    """The turns so far and how answers are shown.

    Attributes:
        refused: how many messages were not answered.
    """

    def __init__(
        self,
        server: Server,
        params: SamplingParams,
        system: str,
        variables: dict[str, Any] | None,
        metrics: bool,
        painting: Callable[[], Paint | None],
    ) -> None:
        self._server = server
        self._params = params
        self._system = system
        self._variables = variables
        self._metrics = metrics
        self._painting = painting
        self._turns: list[ChatMessage] = []
        self.refused = 0

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
            finish, numbers = show(stream, answer, self._painting())
        except RequestError as error:
            print(f"error: {error}", file=sys.stderr)
            self.refused += 1
            return
        except (
            KeyboardInterrupt
        ):  # before there was an answer, or again after its end was asked for
            print()
            return
        if self._metrics and numbers is not None:
            print_metrics(numbers, finish)
        if text := "".join(answer):
            self._turns = [*turns, ChatMessage("assistant", text)]
