"""Errors a user can cause or must be told about. They live in ``ipc.errors``, which every package
may import; here users find them."""

from __future__ import annotations

from ipc.errors import (
    ConfigError,
    ModelError,
    PeerLost,
    RequestError,
    ResourceError,
    SsdPipeError,
)

__all__ = [
    "ConfigError",
    "ModelError",
    "PeerLost",
    "RequestError",
    "ResourceError",
    "SsdPipeError",
]

# Tracebacks tell the name that users can import.
for _kind in (ConfigError, ModelError, PeerLost, RequestError, ResourceError, SsdPipeError):
    _kind.__module__ = __name__
