"""How a terminal shows where the tokens of an answer came from."""

from __future__ import annotations

import os
import sys

from ipc.messages.client import Chunk

ACCEPTED, RECOVERY, BONUS = "\x1b[32m", "\x1b[33m", "\x1b[36m"  # green, yellow, cyan
RESET = "\x1b[0m"


def coloured(chunk: Chunk) -> str:
    """The chunk's text: accepted draft tokens, the recovery or bonus token, the rest plain.

    Colours follow characters. One that several tokens make up, as in many scripts, has the colour
    of the last of them; text that waited for a possible stop text that of what released it.
    """
    accepted, rest = chunk.text[: chunk.accepted_text], chunk.text[chunk.accepted_text :]
    own = ""
    if chunk.drafted and chunk.accepted < len(chunk.token_ids):
        own = BONUS if chunk.accepted == chunk.drafted else RECOVERY
    return _in(ACCEPTED, accepted) + _in(own, rest)


def legend() -> str:
    """What the colours mean."""
    return ", ".join(
        f"{colour}{name}{RESET}"
        for colour, name in (
            (ACCEPTED, "accepted from the draft"),
            (RECOVERY, "recovery token"),
            (BONUS, "bonus token"),
        )
    )


def colours_wanted() -> bool:
    """Standard output is a terminal, and nobody has asked for none (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def _in(colour: str, text: str) -> str:
    return f"{colour}{text}{RESET}" if colour and text else text
