"""torch.profiler around the first steps of a process, into the run's log folder.

``ssd-pipe trace --chrome`` lays the recordings into the time line (``ssd_pipe.trace.kernels``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from ssd_pipe.logs import log_folder
from ssd_pipe.trace.kernels import CLOCK_MARK, SUFFIX

if TYPE_CHECKING:
    import torch

    from procs.runtime import Runtime

_NOTHING: AbstractContextManager[object] = nullcontext()


class StepProfiler:
    """Records ``run.torch_profiler`` steps; with 0 it does nothing at all.

    A context manager: what has been recorded is written, on a thread of its own, when the steps are
    done, at the latest when it is left. To be made once the model is there, but before ``ready``:
    starting the profiler takes seconds. To be used on one thread.

    Args:
        before_stop: called before the profiler stops, which waits for all that the GPU has to do.
    """

    def __init__(self, runtime: Runtime, before_stop: Callable[[], None] = lambda: None) -> None:
        config = runtime.config.run
        self._before_stop = before_stop
        self._left = config.torch_profiler
        self._file = log_folder(config.log_dir, runtime.rundir.name) / f"{runtime.name}{SUFFIX}"
        self._log = runtime.log
        self._writer: threading.Thread | None = None
        self._profiler = _started() if self._left else None

    def step(self, name: str) -> AbstractContextManager[object]:
        """Around one step, which is called ``name`` in the recording."""
        return _Step(self, name) if self._left > 0 else _NOTHING

    def end(self) -> None:
        """A step has ended; after the last one the recording is written."""
        self._left -= 1
        if self._left == 0:
            self._stop()

    def close(self) -> None:
        """Write what there is, and wait until it is written; idempotent."""
        self._left = 0
        self._stop()
        if self._writer is not None:
            self._writer.join()

    def _stop(self) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            self._before_stop()
            profiler.stop()
            self._writer = threading.Thread(target=self._write, args=(profiler,), name="kernels")
            self._writer.start()

    def _write(self, profiler: torch.profiler.profile) -> None:
        fresh = self._file.with_name(f".{self._file.name}")
        try:
            profiler.export_chrome_trace(str(fresh))
            fresh.rename(self._file)
        except OSError as error:
            self._log.warning("kernels not written", file=str(self._file), reason=str(error))
        else:
            self._log.info("kernels", file=str(self._file))

    def __enter__(self) -> StepProfiler:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _started() -> torch.profiler.profile:
    from torch.profiler import profile, record_function

    profiler = profile()
    profiler.start()
    for _ in range(2):  # the first one of all takes its time
        with record_function(f"{CLOCK_MARK}{time.monotonic_ns()}"):
            pass
    return profiler


class _Step(AbstractContextManager[object]):
    def __init__(self, owner: StepProfiler, name: str) -> None:
        from torch.profiler import record_function

        self._owner = owner
        self._mark = record_function(name)

    def __enter__(self) -> None:
        self._mark.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._mark.__exit__(*exception)
        self._owner.end()
