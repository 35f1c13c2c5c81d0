"""What the user types: lines, continued lines, blocks."""

from __future__ import annotations

import sys

from ssd_pipe.cli.prompts import STDIN_NAME, input_failure
from ssd_pipe.errors import ConfigError

QUOTES = '"""'


def check_input() -> None:
    """Raises ConfigError if there is no standard input to read from: it was closed (``<&-``)."""
    if sys.stdin is None:
        raise ConfigError(STDIN_NAME, "is closed, and what to ask is read from it")


def read_message() -> str | None:
    """The user's next message, None at the end of input; Ctrl-C drops what has been typed of it.

    A line that ends in a backslash goes on in the next one. A line that begins with three quotes
    opens a block, which ends with the line that ends in three quotes. Raises ConfigError if
    standard input cannot be read.
    """
    if sys.stdin.isatty():
        import readline  # noqa: F401  (gives input() editing and history)
    while True:
        try:
            return _message()
        except EOFError:
            return None
        except KeyboardInterrupt:
            print()
        except OSError as error:
            raise input_failure(error) from None
        except UnicodeDecodeError as error:
            raise ConfigError(STDIN_NAME, f"is not UTF-8: {error}") from None


def _message() -> str:
    line = _line("> ").strip()
    if line.startswith(QUOTES):
        return _block(line.removeprefix(QUOTES))
    parts = []
    while line.endswith("\\"):
        parts.append(line.removesuffix("\\"))
        line = _more().rstrip()
    return "\n".join([*parts, line])


def _block(line: str) -> str:
    parts = []
    while not line.rstrip().endswith(QUOTES):
        parts.append(line)
        line = _more(QUOTES).rstrip("\n")
    return "\n".join([*parts, line.rstrip().removesuffix(QUOTES)]).strip("\n")


def _line(prompt: str) -> str:
    return input(prompt if sys.stdin.isatty() else "")


def _more(at_end: str = "") -> str:
    """A further line; where input ends, what there is counts."""
    try:
        return _line(". ")
    except EOFError:
        return at_end
