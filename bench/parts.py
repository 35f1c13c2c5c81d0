"""The parts of a benchmark run: each measures, prints its tables and keeps its results."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Console

from bench import exactness, fan_out, frames, machine, measure, prompts, tables, workload
from bench.build import Builder, waves
from bench.compare import Job
from bench.measure import Measured
from bench.options import modes
from bench.plan import Plan
from bench.results import Results
from bench.rows import Row, add_comparisons, sample_record
from bench.sweeps import plan as sweep_plan
from bench.sweeps import run as sweep_run
from bench.trajectories import Trajectory
from ssd_pipe.config import PipelineConfig
from ssd_pipe.errors import ConfigError
from ssd_pipe.hub import resolve
from ssd_pipe.text.tokenizer import Tokenizer


class Bench:
    """One run of the benchmark: its plan, where it prints, where it keeps what it finds.

    Attributes:
        trajectories: of every answer of our own engines so far.
        rows: every row so far, with the part of the run it is from.
    """

    def __init__(self, plan: Plan, out: Console, results: Results) -> None:
        self.trajectories: list[Trajectory] = []
        self.rows: list[tuple[str, Row]] = []
        self._plan = plan
        self._out = out
        self._results = results
        self._target = resolve(plan.config.target.model)
        self._tokenizer = Tokenizer.load(self._target)
        self._frames: list[dict[str, Any]] = []
        self._noted: set[str] = set()

    def run_frame(self, frame: str) -> None:
        """Every chosen engine of a frame, taking turns."""
        plan, jobs = self._plan, self._jobs()
        config = self._fitting(jobs)
        names = [name for name in plan.engines if frames.in_frame(frame, name)]
        if not names:
            raise ConfigError("--engines", f"none of them is in frame {frame}")
        where = frames.layout(frame, "ar")
        load_before = machine.load_average()
        measured = Measured()
        groups = waves(names, plan.one_at_a_time)
        steps = sum(measure.steps(len(g), len(jobs), plan.repeats, plan.batch) for g in groups)
        with workload.progress(f"frame {frame}", steps) as advance:
            for group in groups:
                engines = self._builder().engines(group, frame, config)
                measured.add(
                    measure.measure(engines, jobs, plan.repeats, plan.batch, where, advance)
                )
        sets = list(dict.fromkeys(job.set for job in jobs))
        rows = self._rows(measured, names, "")
        by_set = {s: self._rows(measured, names, s) for s in sets} if len(sets) > 1 else {}
        title = f"frame {frame}: {frames.TITLES[frame]}"
        if by_set:
            listed = [row for some in by_set.values() for row in some]
            self._out.print(tables.speed_table(f"{title}, by set", listed, by_set=True))
        self._out.print(tables.speed_table(title, rows))
        speculation = tables.speculation_table(rows)
        if speculation is not None:
            self._out.print(speculation)
        if measured.bandwidth is not None:
            self._out.print(tables.bandwidth_line(measured.bandwidth))
        self.trajectories += measured.trajectories
        every = [*rows, *(row for some in by_set.values() for row in some)]
        self.rows += [(f"frame {frame}", row) for row in every]
        self._frames.append(
            {
                "frame": frame,
                "title": frames.TITLES[frame],
                "host_cpus": plan.host_cpus,
                "load_average": [load_before, machine.load_average()],
                "bandwidth": measured.bandwidth,
                "engines": measured.facts,
                "rows": rows,
                "set_rows": by_set,
                "samples": [sample_record(sample) for sample in measured.samples],
            }
        )
        self._results.add("frames", self._frames)

    def run_sweep(self) -> None:
        """One row for every combination of the sweep's axes."""
        plan, jobs = self._plan, self._jobs()
        config = self._fitting(jobs)
        groups = sweep_plan.plan(plan.sweep, plan.engines, config, plan.params, plan.batch)
        done: list[sweep_run.Done] = []
        greedy = plan.params.temperature == 0

        def keep(each: sweep_run.Done) -> None:
            done.append(each)
            self.trajectories += each.trajectories
            sweep_run.add_comparisons(done, config, greedy)
            self._results.add("sweep", self._sweep(done))

        with workload.progress(
            "sweep", sweep_run.steps(groups, len(jobs), plan.repeats)
        ) as advance:
            sweep_run.sweep(
                groups, jobs, plan.repeats, plan.sweep_frame, self._builder(), advance, keep
            )
        rows = [each.row for each in done]
        self.rows += [("sweep", row) for row in rows]
        self._out.print(tables.sweep_table([axis.name for axis in plan.sweep], rows))

    def run_fan_out(self) -> None:
        """The table of hit rates."""
        grid, jobs = self._plan.grid, self._jobs()
        config = self._fitting(jobs)
        cells: list[fan_out.Cell] = []
        steps = grid.pipelines * len(grid.temperatures) * len(jobs)
        with workload.progress("fan-out", steps) as advance:
            for cell in fan_out.table(config, jobs, grid, advance):
                cells.append(cell)
                self._results.add("fan_out", cells)
        self._out.print(tables.fan_out_table(cells))

    def run_exactness(self) -> bool:
        """Whether every token was right."""
        plan = self._plan
        chosen = prompts.load("exactness", plan.exactness)
        pairs = [(prompt.id, prompt.tokens(self._tokenizer)) for prompt in chosen]
        longest = max(len(tokens) for _, tokens in pairs)
        config = exactness_config(workload.fitting(plan.config, longest, plan.tokens))
        which = modes(plan.engines)
        with workload.progress("exactness", exactness.steps(len(pairs), len(which))) as advance:
            report = exactness.check(config, self._target, pairs, plan.tokens, which, advance)
        for table in tables.exactness_tables(report):
            self._out.print(table)
        self._results.add("exactness", {"passed": report.passed, **msgspec.to_builtins(report)})
        return report.passed

    def _jobs(self) -> list[Job]:
        made, notes = workload.jobs(self._plan, self._tokenizer)
        for note in notes:
            if note not in self._noted:
                self._out.print(f"note: {note}", soft_wrap=True, highlight=False)
                self._noted.add(note)
        return made

    def _fitting(self, jobs: Sequence[Job]) -> PipelineConfig:
        plan = self._plan
        return workload.fitting(plan.config, workload.longest(jobs), plan.tokens, plan.batch)

    def _builder(self) -> Builder:
        return Builder(
            tokenizer=self._tokenizer,
            host_cpus=self._plan.host_cpus,
            servers=self._plan.servers,
            key=os.environ.get("OPENAI_API_KEY", ""),
        )

    def _sweep(self, done: Sequence[sweep_run.Done]) -> dict[str, Any]:
        plan = self._plan
        return {
            "axes": sweep_run.axes_of(plan.sweep),
            "frame": plan.sweep_frame,
            "rows": [each.row for each in done],
            "settings": {each.cell.key: each.settings for each in done},
            "samples": [{**s, "point": each.cell.point} for each in done for s in each.samples],
        }

    @staticmethod
    def _rows(measured: Measured, names: Sequence[str], prompt_set: str) -> list[Row]:
        rows = [measured.row(name, prompt_set) for name in names]
        samples = [s for s in measured.samples if prompt_set in ("", s.set)]
        add_comparisons(rows, samples, frames.BASELINES)
        return rows


def exactness_config(config: PipelineConfig) -> PipelineConfig:
    """Room for a batch, prefix caching on, and the rule whose sampled tokens all modes share."""
    change = msgspec.structs.replace
    return change(
        config,
        cache=change(config.cache, prefix_caching=True),
        scheduler=change(config.scheduler, max_num_seqs=exactness.BATCH),
        speculation=change(config.speculation, rule="shared_noise", saguaro_c=1.0),
    )
