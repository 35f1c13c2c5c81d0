"""What the GPU benchmarks share: guarded sections, error measures, event timing."""

from __future__ import annotations

import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from bench import machine
from bench.results import write


class Report:
    """Rows of results, written to JSON after every section, so that a time limit loses little."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log = path.with_suffix(".log")
        path.parent.mkdir(parents=True, exist_ok=True)
        self.log.write_text("")
        self.data: dict[str, Any] = {"failed": [], "sections": {}}

    def origin(self, module: str, given: Sequence[str] | None = None) -> None:
        """Say which program this is, of which versions, on which machine. ``given``: its arguments,
        those of the process if None."""
        arguments = sys.argv[1:] if given is None else given
        origin = machine.describe(["python", "-m", module, *arguments])
        origin |= {"date": time.strftime("%Y-%m-%d %H:%M:%S"), "gpus": machine.gpus()}
        origin["versions"]["cuda"] = torch.version.cuda
        self.data["origin"] = origin
        self.note(f"{origin['date']}, {origin['gpus']}, {origin['versions']}")

    def note(self, text: str) -> None:
        """A line for the log and the screen."""
        print(text, flush=True)
        with self.log.open("a") as file:
            file.write(text + "\n")

    def detail(self, text: str) -> None:
        """Text for the log alone."""
        with self.log.open("a") as file:
            file.write(text + "\n")

    def add(self, section: str, **row: Any) -> None:
        """One row of a section, printed as it comes."""
        self.data["sections"].setdefault(section, []).append(row)
        self.note(f"{section:9s} " + "  ".join(f"{k}={_short(v)}" for k, v in row.items()))

    def save(self) -> None:
        write(self.path, self.data)

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Run a block; an error in it goes to the log and loses nothing else."""
        start = time.monotonic()
        try:
            yield
        except Exception as error:
            self.data["failed"].append(name)
            self.note(f"FAILED {name}: {type(error).__name__}: {str(error)[:300]}")
            self.detail(traceback.format_exc())
        finally:
            self.data.setdefault("seconds", {})[name] = round(time.monotonic() - start, 1)
            self.save()


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """Norm of the difference over the reference's; NaN wherever ``out`` has one."""
    wide = reference.double()
    return float((out.double() - wide).norm() / wide.norm().clamp(min=1e-30))


def time_ms(function: Callable[[], object], budget_s: float = 0.4) -> float:
    """Median milliseconds of one call, by device events around each."""
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    start = time.monotonic()
    function()
    torch.cuda.synchronize()
    once = max(time.monotonic() - start, 1e-6)
    repeats = int(min(200, max(9, budget_s / once)))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        function()
        event.record()
    torch.cuda.synchronize()
    spans = [a.elapsed_time(b) for a, b in pairwise(events)]
    return statistics.median(spans)


def graphed(function: Callable[[], object]) -> Callable[[], object]:
    """``function`` as a CUDA graph, so that launches cost what they cost in a real step."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()
        function()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        function()
    return graph.replay


def free_memory() -> None:
    """Give unused device memory back, so that the next model finds it in one piece."""
    import gc

    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
