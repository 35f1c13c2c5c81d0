"""Copy bandwidth of the first device. ``python -m bench.copy_bandwidth cpu|cuda`` prints it."""

from __future__ import annotations

import subprocess
import sys

from ssd_pipe.errors import ResourceError


def copy_bandwidth(device: str) -> float:
    """Bytes a second, read plus written; of "cuda", the current device."""
    if device == "cpu":
        from bench.bandwidth import measure

        return measure(1, size=64 << 20, rounds=3).copy
    import torch

    from bench.gpu_common import time_ms

    source = torch.randn(1 << 30, device=device, dtype=torch.float32)
    target = torch.empty_like(source)
    return 2e3 * source.nbytes / time_ms(lambda: target.copy_(source))


def measured_apart(device: str) -> float:
    """The same in a process of its own, which leaves no memory taken. Raises ResourceError."""
    command = [sys.executable, "-m", "bench.copy_bandwidth", device]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ResourceError(f"no bandwidth measured: {done.stderr.strip()[-500:]}")
    return float(done.stdout)


if __name__ == "__main__":
    print(copy_bandwidth(sys.argv[1]))
