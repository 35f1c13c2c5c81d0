"""What kind of file system a folder is on."""

from __future__ import annotations

import os
from pathlib import Path

IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")


def kind_of(folder: str | Path) -> str:
    """Its name as the kernel has it ("tmpfs", "ext4"); empty if that cannot be found out."""
    try:
        device = os.stat(folder).st_dev
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return ""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts:
        mount, _, rest = line.partition(" - ")
        if mount.split()[2] == wanted:
            return rest.split()[0]
    return ""


def disk_warning(folder: str | Path) -> str:
    """What is to be said of a folder for shared memory (``run.shm_dir``), empty if all is well."""
    kind = kind_of(folder)
    if not kind or kind in IN_MEMORY:
        return ""
    return (
        f"run.shm_dir: {folder} is on {kind}, not tmpfs: what processes share there is written to "
        "the disk, which can hold up any round"
    )
