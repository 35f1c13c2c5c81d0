"""What happened to each answer round by round, out of the scheduler's log.

``--save-trajectories`` writes one JSON line an answer (``Trajectory``), ``--save-trace`` the rounds
of all answers as a file that ``--synthetic-acceptance`` replays (``trace``).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.compare import Job, Sample
from bench.figures import ratio
from ssd_pipe.config import PipelineConfig
from ssd_pipe.errors import ConfigError, ResourceError


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """One verification.

    Attributes:
        accepted: draft tokens accepted.
        chain: draft tokens verified.
        token: what came after them.
        hit: whether the outcome was in the speculation cache; None where none was asked: in the
            last round of an answer and in modes without one.
    """

    accepted: int
    chain: int
    token: int
    hit: bool | None


class Trajectory(msgspec.Struct, kw_only=True):
    """One answer. ``point`` is what a sweep set."""

    engine: str
    set: str
    prompt: str
    repeat: int
    batch: int
    seed: int | None
    temperature: float
    finish: str
    prompt_tokens: int
    tokens: list[int]
    rounds: list[Round]
    point: dict[str, Any] = {}


class _Row(msgspec.Struct):
    rid: int
    k: int
    token: int
    hit: bool | None
    chain: int


class _Line(msgspec.Struct):
    event: str = ""
    t: int = 0
    rid: int = -1
    rows: list[_Row] = []


def read_rounds(log_dir: Path, cached: bool, since: float = 0.0) -> list[list[Round]]:
    """Rounds of every request that finished, in the order in which they came; empty if the run did
    not log them (``run.log_level``).

    Args:
        log_dir: of the run.
        cached: whether the run has a speculation cache.
        since: leave out requests that came before this time (CLOCK_MONOTONIC seconds).
    """
    rounds: dict[int, list[Round]] = {}
    finished: set[int] = set()
    decoder = msgspec.json.Decoder(_Line)
    logs = (log_dir / "scheduler.1.jsonl", log_dir / "scheduler.jsonl")
    for line in [x for log in logs if log.exists() for x in log.read_bytes().splitlines()]:
        if not any(word in line for word in (b'"round"', b'"add"', b'"finish"')):
            continue
        entry = decoder.decode(line)
        if entry.event == "add":
            if entry.t >= since * 1e9:
                rounds[entry.rid] = []
        elif entry.event == "finish":
            finished.add(entry.rid)
        elif entry.event == "round":
            for row in entry.rows:
                if row.rid in rounds:
                    hit = row.hit if cached else None
                    made = Round(accepted=row.k, chain=row.chain, token=row.token, hit=hit)
                    rounds[row.rid].append(made)
    return [_last_unasked(listed) for rid, listed in rounds.items() if rid in finished]


def collect(
    samples: Sequence[Sample], jobs: Sequence[Job], logged: Sequence[Sequence[Round]]
) -> list[Trajectory]:
    """Samples of one engine with their rounds.

    A request is known by the tokens its rounds ended with; requests that are no sample are passed
    over. A sample that none fits has no rounds.
    """
    by_id = {(job.set, job.id): job for job in jobs}
    left = list(logged)
    made = []
    for sample in sorted(samples, key=lambda s: s.answer.started):
        job = by_id[sample.set, sample.prompt]
        place = next((i for i, r in enumerate(left) if _fits(r, sample.answer.tokens)), None)
        made.append(
            Trajectory(
                engine=sample.engine,
                set=sample.set,
                prompt=sample.prompt,
                repeat=sample.repeat,
                batch=sample.batch,
                seed=job.params.seed,
                temperature=job.params.temperature,
                finish=sample.answer.finish,
                prompt_tokens=len(job.tokens),
                tokens=sample.answer.tokens,
                rounds=[] if place is None else list(left.pop(place)),
            )
        )
    return made


def hits_after(trajectories: Iterable[Trajectory]) -> tuple[float | None, float | None]:
    """Hit rate of rounds that follow a hit, and of rounds that follow a miss."""
    counts = {True: [0, 0], False: [0, 0]}
    for trajectory in trajectories:
        asked = [r.hit for r in trajectory.rounds if r.hit is not None]
        for before, now in itertools.pairwise(asked):
            counts[before][now] += 1
    after_hit, after_miss = ((ratio(n[1], n[0] + n[1])) for n in (counts[True], counts[False]))
    return after_hit, after_miss


def trace(trajectories: Sequence[Trajectory], config: PipelineConfig) -> dict[str, Any]:
    """The rounds of real models, to be replayed by ``--synthetic-acceptance FILE``.

    Of those engines the last one in ssd mode counts, and of a sweep its last cell.

    Returns ``{"k", "rounds": [{"accepted", "hit", "chain"}, ...], "pair", "temperature"}``: k, and
    for each round how many tokens of a chain of how many were accepted, and whether its outcome
    was in the speculation cache. Rounds that had no chain or asked no cache are left out. Raises
    ConfigError if no round is left.
    """
    mine = [t for t in trajectories if any(r.hit is not None for r in t.rounds)]
    mine = [t for t in mine if (t.engine, t.point) == (mine[-1].engine, mine[-1].point)]
    rounds = [
        {"accepted": r.accepted, "hit": bool(r.hit), "chain": r.chain}
        for trajectory in mine
        for r in trajectory.rounds
        if r.chain and r.hit is not None
    ]
    if not rounds:
        raise ConfigError("--save-trace", "no engine ran in ssd mode, or no round had a chain")
    return {
        "k": mine[-1].point.get("k", config.speculation.k),
        "rounds": rounds,
        "pair": f"{config.target.model} / {config.draft.model}",
        "temperature": mine[-1].temperature,
    }


def write_lines(path: Path, trajectories: Iterable[Trajectory]) -> None:
    """JSON Lines. Raises ResourceError."""
    _write(path, b"".join(msgspec.json.encode(t) + b"\n" for t in trajectories))


def write_trace(path: Path, content: dict[str, Any]) -> None:
    """JSON. Raises ResourceError."""
    _write(path, msgspec.json.encode(content) + b"\n")


def _write(path: Path, data: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError as error:
        raise ResourceError(f"{path}: {error.strerror}") from None


def _last_unasked(rounds: list[Round]) -> list[Round]:
    """An answer's last outcome is not looked up."""
    return [*rounds[:-1], msgspec.structs.replace(rounds[-1], hit=None)] if rounds else []


def _fits(rounds: Sequence[Round], tokens: Sequence[int]) -> bool:
    end = 0
    for made in rounds:
        if end >= len(tokens):
            return False
        end += made.accepted + 1
        if end <= len(tokens) and tokens[end - 1] != made.token:
            return False
    return end >= len(tokens)
