"""The parts of a benchmark run: each measures, prints its tables and keeps its results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench import bandwidth, exactness, fan_out, frames, machine, prompts, tables
from bench.compare import Advance, Job, compare, warm_up
from bench.engines import running
from bench.options import Plan, modes
from bench.results import Results
from bench.rows import add_comparisons, make_row, sample_record
from models.config import ModelConfig
from ssd_pipe.config import PipelineConfig
from ssd_pipe.errors import ConfigError
from ssd_pipe.hub import resolve
from ssd_pipe.text.tokenizer import Tokenizer

SLACK = 64  # positions beyond prompt and answer


class Bench:
    """One run of the benchmark: its plan, where it prints, where it keeps what it finds."""

    def __init__(self, plan: Plan, out: Console, results: Results) -> None:
        self._plan = plan
        self._out = out
        self._results = results
        self._target = resolve(plan.config.target.model)
        self._tokenizer = Tokenizer.load(self._target)
        self._frames: list[dict[str, Any]] = []

    def jobs(self) -> list[Job]:
        """The chosen prompts, each with its own seed."""
        plan = self._plan
        first = plan.params.seed or 0
        return [
            Job(
                id=prompt.id,
                tokens=prompt.tokens(self._tokenizer),
                params=msgspec.structs.replace(plan.params, seed=first + i),
            )
            for i, prompt in enumerate(prompts.load(plan.prompt_set, plan.prompts))
        ]

    def run_frame(self, frame: str) -> None:
        """Every chosen engine of a frame, taking turns."""
        plan, jobs = self._plan, self.jobs()
        config = self._fitting(max(len(job.tokens) for job in jobs))
        engines = frames.build(frame, plan.engines, config, resolve, plan.host_cpus)
        if not engines:
            raise ConfigError("--engines", f"none of them is in frame {frame}")
        layout = next(iter(frames.layouts(frame).values()))
        load_before = machine.load_average()
        with self._progress(f"frame {frame}", len(jobs) * len(engines) * plan.repeats) as advance:
            advance("loading")
            with running(engines):
                measured = bandwidth.measure(layout.threads, layout.cpus)
                warm_up(engines, jobs[0])
                samples = compare(engines, jobs, plan.repeats, advance)
                again = bandwidth.measure(layout.threads, layout.cpus)
                measured = bandwidth.best(measured, again)
        rows = [
            make_row(
                [s for s in samples if s.engine == engine.name], engine.facts.weight_bytes, measured
            )
            for engine in engines
        ]
        add_comparisons(rows, samples, frames.BASELINES)
        self._out.print(tables.speed_table(f"frame {frame}: {frames.TITLES[frame]}", rows))
        speculation = tables.speculation_table(rows)
        if speculation is not None:
            self._out.print(speculation)
        self._out.print(tables.bandwidth_line(measured))
        self._frames.append(
            {
                "frame": frame,
                "title": frames.TITLES[frame],
                "host_cpus": plan.host_cpus,
                "load_average": [load_before, machine.load_average()],
                "bandwidth": measured,
                "engines": {engine.name: engine.facts for engine in engines},
                "rows": rows,
                "samples": [sample_record(sample) for sample in samples],
            }
        )
        self._results.add("frames", self._frames)

    def run_fan_out(self) -> None:
        """The table of hit rates."""
        grid, jobs = self._plan.grid, self.jobs()
        config = self._fitting(max(len(job.tokens) for job in jobs))
        cells: list[fan_out.Cell] = []
        steps = grid.pipelines * len(grid.temperatures) * len(jobs)
        with self._progress("fan-out", steps) as advance:
            for cell in fan_out.table(config, jobs, grid, advance):
                cells.append(cell)
                self._results.add("fan_out", cells)
        self._out.print(tables.fan_out_table(cells))

    def run_exactness(self) -> bool:
        """Whether every token was right."""
        plan = self._plan
        chosen = prompts.load("exactness", plan.exactness)
        pairs = [(prompt.id, prompt.tokens(self._tokenizer)) for prompt in chosen]
        config = self._fitting(max(len(tokens) for _, tokens in pairs))
        config = exactness_config(config)
        which = modes(plan.engines)
        with self._progress("exactness", exactness.steps(len(pairs), len(which))) as advance:
            report = exactness.check(config, self._target, pairs, plan.tokens, which, advance)
        for table in tables.exactness_tables(report):
            self._out.print(table)
        self._results.add("exactness", {"passed": report.passed, **msgspec.to_builtins(report)})
        return report.passed

    def _fitting(self, longest: int) -> PipelineConfig:
        """The configuration with room for the longest prompt and its answer, and not much more."""
        config, needed = self._plan.config, longest + self._plan.tokens + SLACK
        if config.scheduler.max_model_len:
            return config
        limit = min(_positions(config.target.model), _positions(config.draft.model))
        scheduler = msgspec.structs.replace(config.scheduler, max_model_len=min(needed, limit))
        return msgspec.structs.replace(config, scheduler=scheduler)

    @contextmanager
    def _progress(self, name: str, steps: int) -> Iterator[Advance]:
        """A bar on stderr that is drawn between requests only: drawing takes a core's time."""
        columns = (
            TextColumn("{task.fields[name]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
        )
        console = Console(stderr=True)
        with Progress(*columns, console=console, auto_refresh=False) as bar:
            task = bar.add_task("", total=steps, name=name)
            yield _advance(bar, task)
            bar.update(task, completed=steps, description="done")
            bar.refresh()


def _advance(bar: Progress, task: Any) -> Callable[[str], None]:
    started = False

    def advance(what: str) -> None:
        nonlocal started
        bar.update(task, description=what, advance=1 if started else 0)
        started = True
        bar.refresh()

    return advance


def exactness_config(config: PipelineConfig) -> PipelineConfig:
    """Room for a batch, prefix caching on, and the rule whose sampled tokens all modes share."""
    change = msgspec.structs.replace
    return change(
        config,
        cache=change(config.cache, prefix_caching=True),
        scheduler=change(config.scheduler, max_num_seqs=exactness.BATCH),
        speculation=change(config.speculation, rule="shared_noise", saguaro_c=1.0),
    )


def _positions(model: str) -> int:
    folder: Path = resolve(model)
    return ModelConfig.from_folder(folder).max_positions
