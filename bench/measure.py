"""One comparison: engines started, warmed up, run side by side, and what they say collected."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from bench import bandwidth
from bench.bandwidth import Bandwidth
from bench.compare import Advance, Job, Sample, compare, compare_batched, warm_up
from bench.engines import Engine, Facts, PipelineEngine, running
from bench.frames import Layout
from bench.rows import Row, make_row
from bench.trajectories import Trajectory, collect, hits_after, read_rounds


class Measured(msgspec.Struct, kw_only=True):
    """``facts`` by engine; ``trajectories`` of our own engines only."""

    samples: list[Sample] = []
    trajectories: list[Trajectory] = []
    facts: dict[str, Facts] = {}
    bandwidth: Bandwidth | None = None

    def add(self, other: Measured) -> None:
        """Take what another comparison of the same prompts gave."""
        self.samples += other.samples
        self.trajectories += other.trajectories
        self.facts |= other.facts
        if other.bandwidth is not None:
            mine = self.bandwidth or other.bandwidth
            self.bandwidth = bandwidth.best(mine, other.bandwidth)

    def row(self, engine: str, prompt_set: str = "") -> Row:
        """The row of one engine, over all sets or one."""
        mine = [s for s in self.samples if s.engine == engine and prompt_set in ("", s.set)]
        row = make_row(mine, self.facts[engine].weight_bytes, self.bandwidth)
        seen = [t for t in self.trajectories if t.engine == engine and prompt_set in ("", t.set)]
        row.hit_after_hit, row.hit_after_miss = hits_after(seen)
        return row


def measure(
    engines: Sequence[Engine],
    jobs: Sequence[Job],
    repeats: int,
    batch: int,
    where: Layout | None,
    advance: Advance,
) -> Measured:
    """Start ``engines``, run all jobs on each, stop them.

    ``where`` is the cores whose memory bandwidth counts; None measures none.
    """
    advance("loading")
    with running(engines):
        measured = _bandwidth(where)
        warm_up(engines, jobs[0])
        samples = run(engines, jobs, repeats, batch, advance)
        result = Measured(
            samples=samples,
            facts={engine.name: engine.facts for engine in engines},
            bandwidth=measured,
        )
        again = _bandwidth(where)
        if measured is not None and again is not None:
            result.bandwidth = bandwidth.best(measured, again)
        for engine in engines:
            result.trajectories += trajectories(engine, jobs, samples)
    return result


def run(
    engines: Sequence[Engine], jobs: Sequence[Job], repeats: int, batch: int, advance: Advance
) -> list[Sample]:
    """All jobs on engines that are running."""
    if batch == 1:
        return compare(engines, jobs, repeats, advance)
    return compare_batched(engines, jobs, repeats, batch, advance)


def trajectories(
    engine: Engine, jobs: Sequence[Job], samples: Sequence[Sample]
) -> list[Trajectory]:
    """Rounds of one engine's samples, if it is ours."""
    if not isinstance(engine, PipelineEngine):
        return []
    engine.counters()  # the answer comes after the last round has been logged
    mine = [s for s in samples if s.engine == engine.name]
    begun = min(s.answer.started for s in mine)
    logged = read_rounds(engine.log_dir, engine.mode == "ssd", begun)
    return collect(mine, jobs, logged)


def steps(engines: int, jobs: int, repeats: int, batch: int) -> int:
    """How often ``measure`` calls ``advance``."""
    return 1 + engines * repeats * (jobs if batch == 1 else 1)


def _bandwidth(where: Layout | None) -> Bandwidth | None:
    return None if where is None else bandwidth.measure(where.threads, where.cpus)
