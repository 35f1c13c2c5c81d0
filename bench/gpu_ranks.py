"""Tensor parallelism over the GPUs of one host: steps of true shapes, and the sums inside them.

    python -m bench.gpu_ranks --models llama-3.1-8b --output bench/results/gpu_ranks.json

Random weights; every rank is a process. Times are rank 0's.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
import torch.multiprocessing as processes

from bench.gpu_common import Report, free_memory, graphed
from models.backends.cuda import CudaBackend
from models.cuda.capture import GraphOptions
from models.cuda.graph_runner import GraphRunner
from models.cuda.graphs import StepRow
from models.parallel import TensorParallel
from models.shapes import build_random, shape

BLOCK, CONTEXT, MAX_POSITIONS = 16, 512, 1024
REPEATS = 40
"""The same on every rank, or they would wait for each other forever."""


def main() -> int:
    args = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(_rank, (args, f"file://{folder}/meeting"), nprocs=args.tp)
    return 0


def _rank(rank: int, args: argparse.Namespace, meeting: str) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    tp = TensorParallel.create(rank, args.tp, meeting, device)
    report = Report(args.output) if rank == 0 else None
    if report is not None:
        report.origin("bench.gpu_ranks")
    with torch.inference_mode():
        for kib in (8, 16, 64, 128, 256):
            x = torch.zeros(kib * 512, dtype=torch.bfloat16, device=device)
            ms = _time(graphed(partial(tp.all_reduce, x)))
            _add(report, "sum", KiB=kib, nccl_us=ms * 1e3)
    for name in args.models:
        backend = CudaBackend(device, torch.bfloat16)
        model = build_random(shape(name), backend, max_positions=MAX_POSITIONS, tp=tp)
        kv = model.make_kv(2 * MAX_POSITIONS // BLOCK, BLOCK)
        for eager in (False, True):
            options = GraphOptions(enforce_eager=eager)
            runner = GraphRunner(model, kv, 1, MAX_POSITIONS, options=options)
            times = {}
            for width in (1, 8):
                table = list(range(MAX_POSITIONS // BLOCK))
                runner.run([StepRow(table, CONTEXT, [5] * width, temperature=1.0)], width)
                times[width] = _time(runner.graph(1, width, len(table)).launch)
            runner.close()
            _add(
                report,
                "step",
                shape=name,
                tp=args.tp,
                graph=not eager,
                decode_ms=times[1],
                verify8_ms=times[8],
                rank_GB=model.weight_bytes / 1e9,
            )
        del model, kv
        free_memory()
    tp.close()


def _add(report: Report | None, section: str, **row: object) -> None:
    if report is not None:
        report.add(section, **row)
        report.save()


def _time(launch: Callable[[], object]) -> float:
    """Median milliseconds of a launch."""
    for _ in range(5):
        launch()
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
    events[0].record()
    for event in events[1:]:
        launch()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(events))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--models", nargs="*", default=["llama-3.1-8b"])
    parser.add_argument("--output", type=Path, default=Path("bench/results/gpu_ranks.json"))
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
