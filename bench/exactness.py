"""Whether AR, SD and SSD emit what they must, token for token.

Greedy: transformers' own greedy tokens in float32. Sampled, under shared noise: the tokens that AR
gives one request at a time, with the same seeds. Both alone and in a batch, where requests join and
leave while others run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench import reference
from bench.compare import Advance, Job
from bench.engines import PipelineEngine, running
from bench.frames import Layout, placed
from ssd_pipe.config import Mode, PipelineConfig
from ssd_pipe.params import SamplingParams
from ssd_pipe.threads import available_cores

BATCH = 8
FIRST_SEED = 20_000
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 40},
    {"temperature": 0.8, "min_p": 0.05},
)


class Difference(msgspec.Struct, kw_only=True):
    """The first token at which an answer left its reference; -1 stands for a missing token.

    ``gap``: transformers' best minus second best logit there; None for sampled answers.
    """

    check: str
    mode: str
    batch: int
    prompt: str
    position: int
    expected: int
    got: int
    gap: float | None = None


class Check(msgspec.Struct, kw_only=True):
    """One pass over all prompts."""

    check: str
    mode: str
    batch: int
    prompts: int
    tokens: int
    equal: int


class Report(msgspec.Struct, kw_only=True):
    """``passed`` is True without any difference."""

    checks: list[Check] = []
    differences: list[Difference] = []

    @property
    def passed(self) -> bool:
        return bool(self.checks) and not self.differences


def steps(prompts: int, modes: int) -> int:
    """How often ``check`` calls ``advance``, if no reference is known yet."""
    return prompts + modes * (2 * prompts + 2)


def check(
    base: PipelineConfig,
    folder: Path,
    prompts: Sequence[tuple[str, list[int]]],
    tokens: int,
    modes: Sequence[Mode],
    advance: Advance,
) -> Report:
    """Run everything.

    Args:
        base: settings that all modes share; must hold ``BATCH`` sequences.
        folder: the target's, for transformers.
        prompts: (id, token ids).
        tokens: greedy tokens a prompt; sampled answers have half as many.
        modes: what is compared; sampled answers are held against the first one's.
    """
    cores = len(available_cores())
    known = reference.greedy(folder, [ids for _, ids in prompts], tokens, cores, advance)
    report = Report()
    greedy, sampled = greedy_jobs(prompts, tokens), sampled_jobs(prompts, max(1, tokens // 2))
    gaps = [r.gaps for r in known]
    wanted: list[list[int]] = []
    for mode in modes:
        layout = Layout(threads=cores, draft_threads=1 if mode == "ssd" else cores)
        engine = PipelineEngine(mode, placed(base, mode, layout))
        with running([engine]):

            def passes(
                name: str, jobs: Sequence[Job], engine: PipelineEngine = engine, mode: str = mode
            ) -> list[tuple[int, list[list[int]]]]:
                alone = []
                for job in jobs:
                    advance(f"{name}: {mode}, one at a time")
                    alone.append(engine.generate(job.tokens, job.params).tokens)
                advance(f"{name}: {mode}, batch of {BATCH}")
                together = engine.generate_together(
                    [job.tokens for job in jobs], [job.params for job in jobs]
                )
                return [(1, alone), (BATCH, [answer.tokens for answer in together])]

            for batch, answers in passes("greedy", greedy):
                expected = [r.tokens for r in known]
                _judge(report, ("greedy", mode, batch), greedy, answers, expected, gaps)
            for batch, answers in passes("sampled", sampled):
                wanted = wanted or answers
                _judge(report, ("sampled", mode, batch), sampled, answers, wanted, None)
    return report


def greedy_jobs(prompts: Sequence[tuple[str, list[int]]], tokens: int) -> list[Job]:
    """Exactly ``tokens`` tokens each, end-of-sequence ignored."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return [Job(id=name, tokens=ids, params=params) for name, ids in prompts]


def sampled_jobs(prompts: Sequence[tuple[str, list[int]]], tokens: int) -> list[Job]:
    """A seed of its own for each prompt; the kinds of filters take turns."""
    return [
        Job(
            id=name,
            tokens=ids,
            params=SamplingParams(
                max_tokens=tokens, seed=FIRST_SEED + i, **SAMPLINGS[i % len(SAMPLINGS)]
            ),
        )
        for i, (name, ids) in enumerate(prompts)
    ]


def _judge(
    report: Report,
    kind: tuple[str, str, int],
    jobs: Sequence[Job],
    answers: Sequence[list[int]],
    expected: Sequence[list[int]],
    gaps: Sequence[list[float]] | None,
) -> None:
    name, mode, batch = kind
    equal = 0
    for i, job in enumerate(jobs):
        position = first_difference(answers[i], expected[i])
        if position is None:
            equal += 1
            continue
        report.differences.append(
            Difference(
                check=name,
                mode=mode,
                batch=batch,
                prompt=job.id,
                position=position,
                expected=_at(expected[i], position),
                got=_at(answers[i], position),
                gap=None if gaps is None or position >= len(gaps[i]) else gaps[i][position],
            )
        )
    report.checks.append(
        Check(
            check=name,
            mode=mode,
            batch=batch,
            prompts=len(jobs),
            tokens=sum(map(len, answers)),
            equal=equal,
        )
    )


def first_difference(got: Sequence[int], expected: Sequence[int]) -> int | None:
    """Position of the first token that differs or that only one of the two has; None if equal."""
    for position in range(max(len(got), len(expected))):
        if _at(got, position) != _at(expected, position):
            return position
    return None


def _at(tokens: Sequence[int], position: int) -> int:
    return tokens[position] if position < len(tokens) else -1
