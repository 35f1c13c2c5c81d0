"""Hit rate and tokens per round by allocation, rule, temperature and branch budget.

What counts here are counts, not times; target and draft have a core each, so that every branch is
finished when its outcome comes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from bench import figures as st
from bench.compare import Advance, Job, Sample, compare, warm_up
from bench.engines import PipelineEngine, running
from bench.frames import layout, placed
from ssd_pipe.config import Allocation, PipelineConfig, Rule
from ssd_pipe.errors import ConfigError

ALLOCATIONS: tuple[Allocation, ...] = ("uniform", "geometric", "confidence")
RULES: tuple[Rule, ...] = ("shared_noise", "rejection")
TEMPERATURES = (0.0, 1.0)
BUDGETS = (12, 18)
DESIGN: dict[tuple[str, float, int], tuple[float | None, ...]] = {
    ("shared_noise", 0.0, 6): (0.44, 0.47, 0.57),
    ("shared_noise", 0.0, 12): (0.57, 0.60, 0.67),
    ("shared_noise", 0.0, 18): (0.64, 0.66, 0.74),
    ("shared_noise", 0.0, 24): (0.68, 0.72, 0.78),
    ("shared_noise", 1.0, 12): (0.45, 0.54, 0.62),
    ("shared_noise", 1.0, 18): (0.55, 0.61, 0.69),
    ("shared_noise", 1.0, 24): (0.61, 0.67, 0.74),
    ("rejection", 1.0, 18): (0.46, 0.51, 0.57),
    ("rejection", 1.0, 24): (0.53, 0.58, 0.62),
}
"""Hit rates measured offline when the project was designed, K = 5, in the order of ALLOCATIONS."""


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """What is crossed with what."""

    allocations: tuple[Allocation, ...] = ALLOCATIONS
    rules: tuple[Rule, ...] = RULES
    temperatures: tuple[float, ...] = TEMPERATURES
    budgets: tuple[int, ...] = BUDGETS

    @property
    def pipelines(self) -> int:
        """Each serves all temperatures."""
        return len(self.allocations) * len(self.rules) * len(self.budgets)


class Cell(msgspec.Struct, kw_only=True):
    """One entry of the table; ``expected`` is the hit rate of the design, None without one."""

    rule: str
    temperature: float
    branches: int
    allocation: str
    rounds: int
    hit_rate: float | None
    hit_rate_by_k: list[float | None]
    accepted_mean: float | None
    tokens_per_round: float | None
    expected: float | None


def table(
    base: PipelineConfig, jobs: Sequence[Job], grid: Grid, advance: Advance
) -> Iterator[Cell]:
    """Cells as they are measured, one pipeline after another.

    ``jobs`` have their seeds; the temperature is the grid's. Raises ConfigError for a budget that
    is no multiple of k + 1.
    """
    width = base.speculation.k + 1
    for budget in grid.budgets:
        if budget < width or budget % width:
            raise ConfigError("--budgets", f"{budget} is no multiple of k + 1 = {width}")
    where = layout("a", "ssd")
    for rule in grid.rules:
        for budget in grid.budgets:
            for allocation in grid.allocations:
                speculation = msgspec.structs.replace(
                    base.speculation,
                    rule=rule,
                    allocation=allocation,
                    fan_out=budget // width,
                    fan_out_miss=None,
                    saguaro_c=base.speculation.saguaro_c if rule == "rejection" else 1.0,
                )
                config = msgspec.structs.replace(base, speculation=speculation)
                name = f"{rule}, {allocation}, B = {budget}"
                engine = PipelineEngine(name, placed(config, "ssd", where))
                with running([engine]):
                    for temperature in grid.temperatures:
                        mine = [at_temperature(job, temperature) for job in jobs]
                        warm_up([engine], mine[0])
                        samples = compare([engine], mine, 1, advance)
                        yield make_cell(samples, rule, temperature, budget, allocation)


def at_temperature(job: Job, temperature: float) -> Job:
    """``job`` at another temperature."""
    params = msgspec.structs.replace(job.params, temperature=temperature)
    return msgspec.structs.replace(job, params=params)


def make_cell(
    samples: Sequence[Sample], rule: str, temperature: float, branches: int, allocation: str
) -> Cell:
    """What a pipeline's samples say."""
    counted = st.total([s.counters for s in samples])
    answers = [s.answer for s in samples]
    rounds = sum(map(st.decode_rounds, answers))
    return Cell(
        rule=rule,
        temperature=temperature,
        branches=branches,
        allocation=allocation,
        rounds=rounds,
        hit_rate=st.ratio(counted["hits"], counted["hits"] + counted["misses"]),
        hit_rate_by_k=st.shares(st.indexed(counted, "hits_at"), st.indexed(counted, "misses_at")),
        accepted_mean=st.ratio(counted["accepted"], counted["rounds"]),
        tokens_per_round=st.ratio(sum(map(st.decode_tokens, answers)), rounds),
        expected=expected(rule, temperature, branches, allocation),
    )


def expected(rule: str, temperature: float, branches: int, allocation: str) -> float | None:
    """The hit rate of the design; greedy, the rules do the same."""
    row = DESIGN.get((rule if temperature else "shared_noise", temperature, branches))
    if row is None or allocation not in ALLOCATIONS:
        return None
    return row[ALLOCATIONS.index(allocation)]
