"""Exact speculative speculative decoding as a pipeline of processes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ssd_pipe.client import AsyncClient, Client
    from ssd_pipe.llm import LLM
    from ssd_pipe.params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncClient", "Client", "SamplingParams", "__version__"]

_HOMES = {
    "AsyncClient": "ssd_pipe.client",
    "Client": "ssd_pipe.client",
    "LLM": "ssd_pipe.llm",
    "SamplingParams": "ssd_pipe.params",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: the package itself stays light."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
