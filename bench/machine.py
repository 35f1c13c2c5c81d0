"""What a results file says about where its numbers come from."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from ssd_pipe.threads import available_cores

PACKAGES = (
    "ssd-pipe",
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "numpy",
    "pyzmq",
    "msgspec",
)


def describe(command: Sequence[str]) -> dict[str, Any]:
    """Command line, versions and machine."""
    return {
        "command": list(command),
        "versions": {"python": platform.python_version(), **_versions(), "commit": _commit()},
        "machine": {
            "cpu": cpu_model(),
            "cores": available_cores(),
            "memory_bytes": psutil.virtual_memory().total,
            "system": platform.platform(),
        },
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("SSD_", "OMP_", "MKL_"))
        },
    }


def gpus() -> list[str]:
    """Names of the CUDA devices that this process sees; imports torch."""
    import torch

    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def load_average() -> float:
    """Of the last minute; much above 0 before a run says that others use this machine."""
    return os.getloadavg()[0]


def cpu_model() -> str:
    """As the kernel calls it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _commit() -> str:
    """Commit of the source tree, with "+" if it has changes; empty if it is no checkout."""
    root = Path(__file__).parent.parent
    if not (root / ".git").exists():
        return ""
    try:
        head = _git(root, "rev-parse", "HEAD")
        return head + ("+" if _git(root, "status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=10
    )
    return done.stdout.strip()
