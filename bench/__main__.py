"""``python -m bench`` and ``ssd-pipe bench``."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
from rich.console import Console

from ssd_pipe.errors import ConfigError, SsdPipeError

FAILED_STATUS, USAGE_STATUS, INTERRUPTED_STATUS, ENDED_STATUS = 1, 2, 130, 143
COMMANDS = {
    "compare": "bench.comparison",
    "plot": "bench.plots.command",
    "gpu-table": "bench.gpu_table.command",
}
"""``bench NAME ...``: modules with a ``main(arguments) -> status``; anything else measures."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns 0, 1 for a failure or a token that differs, 2 for wrong usage."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        with _term_unwinds():
            command = COMMANDS.get(given[0]) if given else None
            if command is None:
                return _run(given)
            run: Callable[[list[str]], int] = importlib.import_module(command).main
            return run(given[1:])
    except SsdPipeError as error:
        if os.environ.get("SSD_DEBUG") == "1":
            raise
        print("error:", " ".join(str(error).split()), file=sys.stderr, flush=True)
        return USAGE_STATUS if isinstance(error, ConfigError) else FAILED_STATUS
    except KeyboardInterrupt:
        return INTERRUPTED_STATUS
    except SystemExit as leaving:  # argparse, and _term_unwinds
        return leaving.code if isinstance(leaving.code, int) else FAILED_STATUS


def _run(arguments: list[str]) -> int:
    if "--load" in arguments:
        from bench.load.run import main as load

        return load(arguments)
    from bench.options import parse

    plan = parse(arguments)
    from bench import machine, trajectories, wandb_log
    from bench.parts import Bench
    from bench.results import Results
    from ssd_pipe.fetch import fetch_models

    logger = wandb_log.start(plan.wandb) if plan.wandb else None
    fetch_models(msgspec.structs.replace(plan.config, mode="ssd"))
    out = Console(width=None if sys.stdout.isatty() else 180)
    heading = {
        **machine.describe(["ssd-pipe", "bench", *arguments]),
        "plan": msgspec.to_builtins(plan, enc_hook=str),
    }
    results = Results(plan.output, heading)
    bench = Bench(plan, out, results)
    passed = True
    try:
        for frame in plan.frames:
            bench.run_frame(frame)
        if plan.sweep:
            bench.run_sweep()
        if plan.fan_out_table:
            bench.run_fan_out()
        if plan.exactness:
            passed = bench.run_exactness()
        if plan.trajectories is not None:
            trajectories.write_lines(plan.trajectories, bench.trajectories)
        if plan.trace is not None:
            trajectories.write_trace(
                plan.trace, trajectories.trace(bench.trajectories, plan.config)
            )
        if logger is not None:
            logger.log(heading, bench.rows)
    finally:
        if results.written:
            out.print(f"results: {results.path}", soft_wrap=True)
    return 0 if passed else FAILED_STATUS


@contextmanager
def _term_unwinds() -> Iterator[None]:
    """Inside, SIGTERM ends the program through its ``finally`` blocks, which stop the engines."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: object) -> None:
        sys.exit(ENDED_STATUS)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
