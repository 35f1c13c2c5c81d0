"""Prints the copy bandwidth of the first device: ``python -m bench.copy_bandwidth cpu|cuda``."""

from __future__ import annotations

import sys


def copy_bandwidth(device: str) -> float:
    """Bytes a second, read plus written."""
    if device == "cpu":
        from bench.bandwidth import measure

        return measure(1, size=64 << 20, rounds=3).copy
    import torch

    from bench.gpu_common import time_ms

    source = torch.zeros(1 << 30, device="cuda:0", dtype=torch.float32)
    target = torch.empty_like(source)
    return 2e3 * source.nbytes / time_ms(lambda: target.copy_(source))


if __name__ == "__main__":
    print(copy_bandwidth(sys.argv[1]))
