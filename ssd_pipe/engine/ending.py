"""Where an answer ends."""

from __future__ import annotations

from collections.abc import Collection


def cut(tokens: list[int], room: int, stop_ids: Collection[int]) -> tuple[list[int], str]:
    """End ``tokens`` at the first stop id or after ``room`` of them, whichever comes first.

    Returns:
        what is left of them, and "stop", "length", or "" if the answer goes on.
    """
    for i, token in enumerate(tokens[:room]):
        if token in stop_ids:
            return tokens[: i + 1], "stop"
    if len(tokens) >= room:
        return tokens[:room], "length"
    return tokens, ""
