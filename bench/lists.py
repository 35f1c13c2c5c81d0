"""Comma-separated lists of the command line."""

from __future__ import annotations


def names(text: str) -> list[str]:
    """``a,b`` -> the names."""
    return [part.strip() for part in text.split(",") if part.strip()]


def integers(text: str) -> list[int]:
    """``1,2`` -> the numbers. Raises ValueError."""
    return [int(part) for part in names(text)]


def numbers(text: str) -> list[float]:
    """``0,.5`` -> the numbers. Raises ValueError."""
    return [float(part) for part in names(text)]
