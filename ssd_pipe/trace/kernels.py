"""What torch.profiler recorded in the processes, on the time line's own clock.

A recording (see ``procs.profiling``) holds a mark whose name is the CLOCK_MONOTONIC time at which
it was made, which ties the profiler's clock to that of the logs.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from ssd_pipe.errors import ResourceError
from ssd_pipe.trace.chrome import MAIN, TraceEvent, origin, process_ids
from ssd_pipe.trace.timeline import TimeLine

SUFFIX = ".kernels.json.gz"
CLOCK_MARK = "CLOCK_MONOTONIC "
SHOWN = {"kernel", "gpu_memcpy", "gpu_memset", "cpu_op", "user_annotation", "cuda_runtime"}
"""Categories of the profiler's events that are kept."""


def read_kernels(folder: Path, line: TimeLine) -> list[TraceEvent]:
    """Events of every recording in a log folder, for ``chrome.write_chrome``.

    Of a process that the time line does not have nothing is taken. Raises ResourceError for a
    recording that cannot be read.
    """
    pids = process_ids(line)
    events: list[TraceEvent] = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        process = path.name.removesuffix(SUFFIX)
        if process in pids:
            events += _shifted(_load(path), pids[process], origin(line), path)
    return events


def _load(path: Path) -> list[TraceEvent]:
    try:
        content = msgspec.json.decode(gzip.decompress(path.read_bytes()), type=dict[str, Any])
    except (OSError, EOFError, zlib.error, msgspec.DecodeError) as error:
        raise ResourceError(f"{path}: not a recording of torch.profiler: {error}") from None
    events: list[TraceEvent] = content.get("traceEvents", [])
    return events


def _shifted(recorded: list[TraceEvent], pid: int, begin: int, path: Path) -> Iterator[TraceEvent]:
    """Recorded events, in microseconds from ``begin``, on tracks of process ``pid``."""
    marks = [e for e in recorded if str(e.get("name", "")).startswith(CLOCK_MARK) and "ts" in e]
    mark = max(marks, key=lambda event: float(event["ts"]), default=None)
    if mark is None:
        raise ResourceError(f"{path}: has no clock mark")
    shift = (int(mark["name"].removeprefix(CLOCK_MARK)) - begin) / 1000 - float(mark["ts"])
    tracks: dict[tuple[Any, Any], int] = {}
    for event in recorded:
        if event.get("ph") != "X" or event.get("cat") not in SHOWN or event in marks:
            continue
        source = (event.get("pid"), event.get("tid"))
        if source not in tracks:
            tracks[source] = MAIN + 1 + len(tracks)
            where = "torch" if event["cat"] in ("cpu_op", "user_annotation") else event["cat"]
            yield {
                "ph": "M",
                "name": "thread_name",
                "pid": pid,
                "tid": tracks[source],
                "args": {"name": f"{where} {source[1]}"},
            }
        yield event | {"pid": pid, "tid": tracks[source], "ts": float(event["ts"]) + shift}
