"""Errors a user can cause or must be told about, each with the field or resource it names.

Here, where every package may take them from; ``ssd_pipe.errors`` is their public name.
"""

from __future__ import annotations

SHOWN = 100  # characters of a value that a message repeats


def shown(value: object) -> str:
    """A value as a message repeats it: its repr, cut where that is long."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text)} characters)"


class SsdPipeError(Exception):
    """Base of every error this project raises on purpose; its text is one readable line."""


class ConfigError(SsdPipeError):
    """A setting is unknown, out of range, or does not fit another one.

    Attributes:
        field: dotted name of the setting, as in the TOML file (``speculation.k``).
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class ModelError(SsdPipeError):
    """A model folder cannot be used: missing file, missing weight, unsupported architecture."""


class RequestError(SsdPipeError):
    """A request cannot be served. Never affects another request.

    Attributes:
        code: HTTP-style class of the error: 400 invalid, 401 key refused, 413 too large,
            429 queue full, 499 cancelled, 500 a fault of ours, 503 not available, 504 deadline
            passed.
        field: the request field at fault, empty if none is.
    """

    def __init__(self, code: int, message: str, field: str = "") -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.code = code
        self.field = field


class PeerLost(SsdPipeError):
    """A process this one depends on died, stopped answering, or missed a deadline.

    Attributes:
        peer: name of that process; empty where it is not known, or not one of a pipeline.
    """

    def __init__(self, message: str, peer: str = "") -> None:
        super().__init__(message)
        self.peer = peer


class ResourceError(SsdPipeError):
    """The machine lacks something: shared memory, a free run directory, a port, memory."""
