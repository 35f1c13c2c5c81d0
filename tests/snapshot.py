"""What the processes of a group hold, to be compared with what they held before."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Snapshot:
    """What a group of processes holds. Resident bytes are kept apart: they may grow a little."""

    files: dict[str, int]
    threads: dict[str, int]
    mapped: dict[str, int]
    run_dir: dict[str, int]
    blocks: dict[str, float]
    resident: dict[str, int] = field(compare=False)

    @classmethod
    def take(cls, pids: dict[str, int], run_dir: Path, counters: dict[str, float]) -> Snapshot:
        processes = {name: psutil.Process(pid) for name, pid in pids.items()}
        return cls(
            files={name: p.num_fds() for name, p in processes.items()},
            threads={name: p.num_threads() for name, p in processes.items()},
            mapped={name: _mapped(p.pid, run_dir) for name, p in processes.items()},
            run_dir={str(f.relative_to(run_dir)): f.stat().st_size for f in run_dir.rglob("*")},
            blocks={name: n for name, n in counters.items() if name.endswith("_blocks")},
            resident={name: p.memory_info().rss for name, p in processes.items()},
        )

    def difference(self, before: Snapshot, without: Collection[str] = ()) -> str:
        """What is not as it was, one line; empty if all is. ``without``: processes left out."""
        parts = []
        for name in ("files", "threads", "mapped", "run_dir", "blocks"):
            then, now = getattr(before, name), getattr(self, name)
            changed = {k for k in then.keys() | now.keys() if then.get(k) != now.get(k)}
            kept = sorted(changed.difference(without))
            parts += [f"{name} of {k}: {then.get(k)} -> {now.get(k)}" for k in kept]
        return "; ".join(parts)


def _mapped(pid: int, run_dir: Path) -> int:
    """Mappings of shared-memory files of the run."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return sum(str(run_dir) in line for line in lines)
