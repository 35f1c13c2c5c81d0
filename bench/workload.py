"""What the parts of a run share: prompts as jobs, a configuration they fit, a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench import datasets
from bench.compare import Advance, Job
from bench.plan import Plan
from models.config import ModelConfig
from ssd_pipe.config import PipelineConfig
from ssd_pipe.errors import ConfigError
from ssd_pipe.hub import resolve
from ssd_pipe.text.tokenizer import Tokenizer

SLACK = 64  # positions beyond prompt and answer


def jobs(plan: Plan, tokenizer: Tokenizer) -> tuple[list[Job], list[str]]:
    """The chosen prompts, set by set, each with a seed that depends on its place in its set.

    Also returns notes for the user: sets that are not to be had. Prompts that would not fit the
    models keep their last tokens. Raises ConfigError.
    """
    notes: list[str] = []
    if plan.sets:
        chosen = datasets.several(plan.sets, plan.prompts)
    else:
        chosen, notes = datasets.every(plan.prompts)
    first = plan.params.seed or 0
    room = _limit(plan.config) - plan.tokens - SLACK
    if room < 1:
        raise ConfigError("--tokens", f"{plan.tokens} leave no room for a prompt in these models")
    made = [
        Job(
            id=prompt.id,
            tokens=prompt.tokens(tokenizer)[-room:],
            params=msgspec.structs.replace(plan.params, seed=first + i),
            set=name,
        )
        for name, prompts in chosen.items()
        for i, prompt in enumerate(prompts)
    ]
    return made, notes


def fitting(config: PipelineConfig, longest: int, tokens: int, batch: int = 1) -> PipelineConfig:
    """The configuration with room for the longest prompt and its answer, and not much more."""
    change: Callable[..., Any] = msgspec.structs.replace
    scheduler = config.scheduler
    if not scheduler.max_model_len:
        length = min(longest + tokens + SLACK, _limit(config))
        scheduler = change(scheduler, max_model_len=length)
    seqs = max(scheduler.max_num_seqs, batch)
    rows = max(scheduler.max_batched_tokens, seqs * (config.speculation.k + 1))
    scheduler = change(scheduler, max_num_seqs=seqs, max_batched_tokens=rows)
    fitted: PipelineConfig = change(config, scheduler=scheduler)
    return fitted


def longest(made: Sequence[Job]) -> int:
    """Tokens of the longest prompt."""
    return max(len(job.tokens) for job in made)


@contextmanager
def progress(name: str, steps: int) -> Iterator[Advance]:
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


def _limit(config: PipelineConfig) -> int:
    if config.scheduler.max_model_len:
        return config.scheduler.max_model_len
    return min(_positions(config.target.model), _positions(config.draft.model))


def _positions(model: str) -> int:
    folder: Path = resolve(model)
    return ModelConfig.from_folder(folder).max_positions
