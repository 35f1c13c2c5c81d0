"""How many GPUs torch can use. Where the machine has none, torch need not be asked: its import is
most of what such a question costs."""

from __future__ import annotations

from pathlib import Path

_NODES = ("nvidia[0-9]*", "nvidiactl", "dxg", "kfd")  # below /dev: drivers that torch can speak to


def usable_gpus() -> int:
    """Their number; 0 without a driver's device node, or where torch cannot use them."""
    if not any(next(Path("/dev").glob(pattern), None) for pattern in _NODES):
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
