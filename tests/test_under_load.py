"""Many requests at once on whole pipelines: who gets on in which step, and how much is speculated.

Counted in steps, from the pipeline's own logs, so that the machine's speed does not matter.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ssd_pipe.client import Client
from ssd_pipe.config_load import load
from ssd_pipe.params import SamplingParams
from ssd_pipe.supervisor import Supervisor
from tests.models.tiny import perturbed
from tests.pipelines import byte_model

USERS = 64


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    target = byte_model(folder, "target")
    return target, perturbed(target, folder / "draft", 0.02)


class Run:
    """A pipeline and its client; afterwards, what its scheduler logged."""

    def __init__(self, client: Client, log_dir: Path) -> None:
        self.client = client
        self._log = log_dir / "scheduler.jsonl"
        self._steps = log_dir / "target-0.jsonl"

    def generate(self, prompt: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        return self.client.generate(token_ids=prompt, params=params).token_ids

    def together(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[tuple[int, ...]]:
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.generate(prompt, max_tokens), prompts))

    def added(self) -> list[int]:
        """Request ids as they came."""
        return [entry["rid"] for entry in _lines(self._log, "add")]

    def rounds(self) -> dict[int, list[int]]:
        """Step number -> requests that got a token in it."""
        rounds = _lines(self._log, "round")
        return {entry["step"]: [row["rid"] for row in entry["rows"]] for entry in rounds}

    def tokens(self) -> dict[int, int]:
        """Step number -> tokens fed."""
        return {entry["step"]: entry["tokens"] for entry in _lines(self._steps, "verify")}

    def counters(self) -> Mapping[str, float]:
        return self.client.status().counters


def _lines(path: Path, event: str) -> list[dict[str, Any]]:
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    return [entry for entry in entries if entry.get("event") == event]


@contextmanager
def running(
    pair: tuple[Path, Path], folder: Path, shm_dir: Path, mode: str, **settings: Any
) -> Iterator[Run]:
    given = {
        "mode": mode,
        "target.model": str(pair[0]),
        "draft.model": str(pair[1]),
        "run.shm_dir": str(shm_dir),
        "run.log_dir": str(folder / "logs"),
        "scheduler.max_model_len": 256,
        "cache.block_size": 4,
        "cache.prefix_caching": False,
    }
    given |= {name.replace("__", "."): value for name, value in settings.items()}
    with Supervisor(load(None, given)) as supervisor, Client(supervisor.endpoint) as client:
        yield Run(client, supervisor.log_dir)


def spans(rounds: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
    """Request id -> the steps in which it got a token."""
    steps: dict[int, list[int]] = {}
    for step, rids in sorted(rounds.items()):
        for rid in rids:
            steps.setdefault(rid, []).append(step)
    return steps


@pytest.mark.parametrize("mode", ["ar", "ssd"])
def test_sixty_four_users_all_get_on_in_every_step(
    mode: str, pair: tuple[Path, Path], tmp_path: Path, shm_dir: Path
) -> None:
    prompts = [[3 + (i * 7 + j) % 200 for j in range(5 + i % 40)] for i in range(USERS)]
    with running(pair, tmp_path, shm_dir, mode) as run:
        answers = run.together(prompts, 20)
        counters = run.counters()
    assert [len(answer) for answer in answers] == [20] * USERS
    assert counters["free_blocks"] == counters["total_blocks"]
    steps = spans(run.rounds())
    # From its first token to its last, a request gets at least one in every step there is.
    for mine in steps.values():
        assert mine == list(range(mine[0], mine[-1] + 1))
    firsts = [steps[rid][0] for rid in run.added()]
    assert firsts == sorted(firsts)


def test_a_long_prompt_delays_others_by_a_chunk_a_step(
    pair: tuple[Path, Path], tmp_path: Path, shm_dir: Path
) -> None:
    """However long the prompt that comes in, who is decoding gets a token in every step, and no
    step is longer than its budget."""
    budget = 32
    with running(
        pair, tmp_path, shm_dir, "ssd", scheduler__max_batched_tokens=budget,
        scheduler__max_num_seqs=4, scheduler__long_prefill_token_threshold=budget,
    ) as run:  # fmt: skip
        params = SamplingParams(max_tokens=240, ignore_eos=True)
        with run.client.stream(token_ids=[5], params=params) as stream:
            next(stream)
            run.generate([9] * 200, 1)
            seen = sum(len(chunk.token_ids) for chunk in stream)
    first, second = run.added()
    steps = spans(run.rounds())
    assert seen == 239
    assert steps[first] == list(range(steps[first][0], steps[first][-1] + 1))
    during = [step for step in steps[first] if step <= steps[second][0]]
    assert len(during) > 200 / budget
    tokens = run.tokens()
    assert max(tokens.values()) <= budget
    assert sum(tokens[step] > budget // 2 for step in during) >= 200 // budget - 1


def test_adaptive_speculation_says_what_plain_decoding_says(
    pair: tuple[Path, Path], tmp_path: Path, shm_dir: Path
) -> None:
    prompts = [[3 + (i * 11 + j) % 250 for j in range(9)] for i in range(12)]
    said = {}
    for mode in ("ar", "sd", "ssd"):
        with running(pair, tmp_path / mode, shm_dir, mode) as run:
            alone = [run.generate(prompt, 240) for prompt in prompts[:3]]
            said[mode] = alone + run.together(prompts, 100)
            counters = run.counters()
        kinds = {name: counters[f"steps_{name}"] for name in ("plain", "in_turn", "parallel")}
        if mode == "ar":
            assert kinds["in_turn"] == kinds["parallel"] == 0 < kinds["plain"]
        else:
            # More than one way was tried, and went on from where the other one was.
            assert counters["probes"] > 0
            assert sum(count > 0 for count in kinds.values()) > 1
            assert counters["accepted"] > 0
    assert said["ar"] == said["sd"] == said["ssd"]


def test_disable_by_batch_size(pair: tuple[Path, Path], tmp_path: Path, shm_dir: Path) -> None:
    fixed = {"speculation__adaptive": False, "speculation__disable_by_batch_size": 1}
    prompts = [[7, 8, 9 + i] for i in range(3)]
    with running(pair, tmp_path, shm_dir, "ssd", **fixed) as run:
        alone = [run.generate(prompt, 30) for prompt in prompts]
        before = run.counters()
        assert before["steps_plain"] == 0 < before["steps_parallel"]
        assert run.together(prompts, 30) == alone
        after = run.counters()
        assert after["steps_plain"] > 0
        assert after["steps_in_turn"] == 0
