"""How much of what a client sent an error sends back."""

from __future__ import annotations

MAX_TEXT = 1000  # characters


def shortened(text: str) -> str:
    """``text``, or its beginning and an ellipsis."""
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..."
