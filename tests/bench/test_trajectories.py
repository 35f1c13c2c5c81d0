"""Rounds out of the scheduler's log, put to the answers they made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.compare import Job, Sample
from bench.engines import Answer
from bench.trajectories import Round, collect, hits_after, read_rounds, trace
from ssd_pipe.config import PipelineConfig
from ssd_pipe.errors import ConfigError
from ssd_pipe.params import SamplingParams


def logged(rid: int, k: int, token: int, hit: bool = False, chain: int = 2) -> dict[str, Any]:
    row = {"rid": rid, "chain": chain, "k": k, "token": token, "hit": hit, "ready": 0}
    return {"event": "round", "t": 1, "step": 1, "rows": [row]}


def write(folder: Path, *lines: dict[str, Any]) -> Path:
    (folder / "scheduler.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def sample(prompt: str, tokens: list[int], started: float) -> Sample:
    answer = Answer(started=started, arrivals=[(started, 1)], tokens=tokens, finish="length")
    return Sample(engine="ssd", prompt=prompt, repeat=0, answer=answer)


def job(name: str) -> Job:
    return Job(id=name, tokens=[1, 2], params=SamplingParams(seed=4, temperature=0.5))


def test_rounds_go_to_the_answer_whose_tokens_they_ended_with(tmp_path: Path) -> None:
    write(
        tmp_path,
        {"event": "add", "t": 5, "rid": 1, "prompt_tokens": 2},  # the warm-up
        logged(1, 0, 99),
        {"event": "finish", "rid": 1, "reason": "length"},
        {"event": "add", "t": 10**9, "rid": 2, "prompt_tokens": 2},
        {"event": "add", "t": 10**9, "rid": 3, "prompt_tokens": 2},
        logged(2, 0, 10, hit=True, chain=0),
        logged(3, 0, 20, chain=0),
        logged(2, 1, 12, hit=False),
        logged(3, 2, 23, hit=True),
        logged(2, 2, 15),  # one token more than the limit
        {"event": "finish", "rid": 2, "reason": "length"},
        logged(3, 0, 24),
        {"event": "finish", "rid": 3, "reason": "stop"},
        {"event": "add", "t": 10**9, "rid": 4, "prompt_tokens": 2},
        logged(4, 0, 30),  # still running
    )
    assert len(read_rounds(tmp_path, cached=True)) == 3
    rounds = read_rounds(tmp_path, cached=True, since=1.0)
    assert len(rounds) == 2
    later, first = sample("b", [20, 21, 22, 23, 24], 2.0), sample("a", [10, 11, 12, 13, 14], 1.0)
    a, b = collect([later, first], [job("a"), job("b")], rounds)
    assert (a.prompt, b.prompt) == ("a", "b")
    assert a.rounds == [
        Round(accepted=0, chain=0, token=10, hit=True),
        Round(accepted=1, chain=2, token=12, hit=False),
        Round(accepted=2, chain=2, token=15, hit=None),
    ]
    assert [r.hit for r in b.rounds] == [False, True, None]
    assert (a.seed, a.temperature, a.prompt_tokens) == (4, 0.5, 2)
    assert hits_after([a, b]) == (0.0, 1.0)
    made = trace([a, b], PipelineConfig())
    assert made["rounds"] == [
        {"accepted": 1, "hit": False, "chain": 2},
        {"accepted": 2, "hit": True, "chain": 2},
    ]
    assert (made["k"], made["temperature"]) == (5, 0.5)
    assert made["pair"] == "smollm2-135m-instruct / smollm2-draft-16m"


def test_an_answer_that_no_rounds_fit_has_none(tmp_path: Path) -> None:
    write(
        tmp_path,
        {"event": "add", "t": 10**9, "rid": 1, "prompt_tokens": 2},
        logged(1, 0, 10),
        {"event": "finish", "rid": 1, "reason": "length"},
    )
    [only] = collect([sample("a", [11], 0.0)], [job("a")], read_rounds(tmp_path, True))
    assert only.rounds == []


def test_without_a_cache_nothing_is_a_hit_or_a_miss(tmp_path: Path) -> None:
    write(
        tmp_path,
        {"event": "add", "t": 10**9, "rid": 1, "prompt_tokens": 2},
        logged(1, 0, 10),
        logged(1, 1, 12),
        {"event": "finish", "rid": 1, "reason": "length"},
    )
    found = collect([sample("a", [10, 11, 12], 0.0)], [job("a")], read_rounds(tmp_path, False))
    assert [r.hit for r in found[0].rounds] == [None, None]
    assert hits_after(found) == (None, None)
    with pytest.raises(ConfigError, match="no engine ran in ssd mode"):
        trace(found, PipelineConfig())
