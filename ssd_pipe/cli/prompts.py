"""What a command is to read: from its arguments, from files, from standard input."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import typer

from ssd_pipe.errors import ConfigError

STDIN = "-"
STDIN_NAME = "standard input"
TITLE_LENGTH = 60

System = Annotated[str, typer.Option("--system", help="system message before the first turn")]
TemplateKwargs = Annotated[
    str | None,
    typer.Option(
        "--chat-template-kwargs",
        metavar="JSON",
        help='variables of the chat template: {"enable_thinking": false}',
    ),
]


class Given(NamedTuple):
    """A text and what to call it in a heading."""

    title: str
    text: str


def read_prompts(prompts: Sequence[str], files: Sequence[Path]) -> list[Given]:
    """The texts to answer: ``prompts``, where - is standard input, or what the files hold, or if
    neither is given standard input; in UTF-8, but for the newline at the end of what is read.

    Raises ConfigError.
    """
    if files:
        if prompts:
            raise ConfigError("--file", "is instead of a prompt on the command line, not besides")
        return [Given(str(path), _read("--file", path)) for path in files]
    # Python has no sys.stdin where it was closed (``<&-``).
    unread = sys.stdin is None or (not prompts and sys.stdin.isatty())
    if unread and (not prompts or STDIN in prompts):
        raise ConfigError("PROMPT", "none is given; write one, pipe one in, or name a --file")
    if prompts.count(STDIN) > 1:
        raise ConfigError("PROMPT", "standard input can be read once")
    return [
        Given(STDIN_NAME, _read("PROMPT")) if prompt == STDIN else _written(prompt)
        for prompt in prompts or [STDIN]
    ]


def parse_variables(text: str | None) -> dict[str, Any] | None:
    """What ``--chat-template-kwargs`` says. Raises ConfigError."""
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError) as error:
        reason = f'must be a JSON object, as {{"enable_thinking": false}}: {error}'
        raise ConfigError("--chat-template-kwargs", reason) from None


def input_failure(error: OSError) -> ConfigError:
    """Standard input cannot be read: write-only, a device's fault, a terminal that is gone."""
    return ConfigError(STDIN_NAME, f"cannot be read: {error.strerror or type(error).__name__}")


def check_unicode(argument: str, said: str) -> None:
    """Raises ConfigError for what was typed and is no UTF-8, which Python keeps as surrogates."""
    try:
        said.encode()
    except UnicodeEncodeError:
        raise ConfigError(argument, "is not valid Unicode") from None


def _written(prompt: str) -> Given:
    if not prompt:
        raise ConfigError("PROMPT", "is empty")
    check_unicode("PROMPT", prompt)
    return Given(textwrap.shorten(prompt, TITLE_LENGTH, placeholder=" ..."), prompt)


def _read(where: str, path: Path | None = None) -> str:
    """The text of a file, or of standard input. ``where``: the argument that named it."""
    try:
        data = sys.stdin.buffer.read() if path is None else path.read_bytes()
        text = data.decode().removesuffix("\n")
    except OSError as error:
        if path is None:
            raise input_failure(error) from None
        raise ConfigError(where, f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(where, f"is not UTF-8: {error}") from None
    if not text:
        raise ConfigError(where, "is empty" if path is None else f"{path} is empty")
    return text
