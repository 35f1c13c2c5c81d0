"""Who answers: a running pipeline, or any OpenAI-compatible server."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Annotated, Any, Protocol
from urllib.parse import urlsplit

import msgspec
import typer

from ipc.curve import is_exposed
from ipc.messages.client import ChatMessage
from ssd_pipe.cli.connect import PLACE_OPTIONS, Place
from ssd_pipe.cli.expand import expand, option
from ssd_pipe.cli.talk import AnswerStream
from ssd_pipe.errors import ConfigError
from ssd_pipe.params import SamplingParams


class Server(Protocol):
    """A pipeline's client, or an OpenAIServer."""

    def chat(
        self,
        messages: list[ChatMessage],
        params: SamplingParams,
        *,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> AnswerStream:
        """Stream the answer to a conversation."""

    def stream(self, prompt: str, params: SamplingParams) -> AnswerStream:
        """Stream the continuation of a text."""


class ServerChoice(msgspec.Struct, frozen=True):
    """Whom the command line names: a server if there is a ``url``, else a pipeline."""

    place: Place
    url: str = ""
    model: str = ""
    api_key: str = ""

    def check(self) -> None:
        """Raises ConfigError for options that contradict each other."""
        if self.url and self.place:
            raise ConfigError("--url", "names a server, --run, --endpoint and --shm-dir a pipeline")
        if not self.url and (self.model or self.api_key):
            flag = "--model" if self.model else "--api-key"
            raise ConfigError(flag, "is for a server at --url")

    def connect(self, limited: bool) -> AbstractContextManager[Server]:
        """``limited``: whether the user gave --max-tokens.

        Raises as ``Place.connect`` and ``OpenAIServer`` do.
        """
        if not self.url:
            return self.place.connect()
        from ssd_pipe.openai_server import OpenAIServer

        # A server refuses a limit that the context has no room for, where a pipeline cuts it.
        return OpenAIServer(self.url, self.model, self.api_key or key_for(self.url), limited)


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


def _text(flag: str, text: str) -> Any:
    return Annotated[str, typer.Option(flag, help=text)]


def _choice(values: dict[str, Any]) -> ServerChoice:
    place = Place(**{p.name: values.pop(p.name) for p in PLACE_OPTIONS})
    return ServerChoice(place, **values)


server_options = expand(
    "server",
    [
        *PLACE_OPTIONS,
        option("url", _text("--url", "an OpenAI-compatible server: http://HOST:PORT/v1"), ""),
        option("model", _text("--model", "its model; none = the first it lists"), ""),
        option(
            "api_key",
            _text("--api-key", "its key; or OPENAI_API_KEY, here also SSD_API_KEY"),
            "",
        ),
    ],
    _choice,
)
"""Gives a command the options that say who answers, as ``server: ServerChoice``."""
