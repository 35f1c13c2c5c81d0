"""Whole pipelines with two target ranks and several draft workers, in processes of their own."""

from __future__ import annotations

import json
import os
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ssd_pipe.config_load import load
from ssd_pipe.errors import ConfigError
from ssd_pipe.footprint import MIB, shared_bytes
from ssd_pipe.gpu_assignment import assign
from ssd_pipe.members import process_name, process_names
from ssd_pipe.params import SamplingParams
from ssd_pipe.threads import process_cores, thread_count, worker_cores
from tests.test_pipeline import PROMPTS, TOKENS, encode, pipeline
from tests.waiting import wait_for

TWO = ("--tp", "2", "--draft-workers", "2", "--fan-out", "3")
START = 120.0  # seconds; several test runs may share two cores
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 5}


@pytest.fixture(scope="module")
def alone(
    pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[list[int]]]:
    """The target's own tokens of PROMPTS."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "shm").mkdir()
    with pipeline(pair, folder, folder / "shm", "ar") as run:
        return {
            "greedy": [run.generate(prompt) for prompt in PROMPTS],
            "sampled": [run.generate(prompt, **SAMPLED) for prompt in PROMPTS],
        }


def drafted(run_facts: dict[str, Any], worker: int) -> list[dict[str, Any]]:
    """A draft worker's rounds, from its log."""
    path = Path(run_facts["log_dir"]) / f"draft-{worker}.jsonl"
    lines = (json.loads(line) for line in path.read_text().splitlines())
    return [line for line in lines if line.get("event") == "draft"]


def test_two_ranks_and_two_drafts_give_the_targets_own_tokens(
    pair: tuple[Path, Path],
    alone: dict[str, list[list[int]]],
    tmp_path: Path,
    shm_dir: Path,
) -> None:
    with pipeline(pair, tmp_path, shm_dir, "ssd", *TWO) as run:
        assert {"target-0", "target-1", "draft-0", "draft-1"} < set(run.facts["pids"])
        assert [run.generate(prompt) for prompt in PROMPTS] == alone["greedy"]
        assert run.together(PROMPTS) == alone["greedy"]
        assert run.together(PROMPTS, **SAMPLED) == alone["sampled"]
        counters = run.client.status().counters
        assert counters["hits"] > 0
        assert counters["free_blocks"] == counters["total_blocks"]
        rounds = [drafted(run.facts, worker) for worker in range(2)]
    assert run.process.returncode == 0
    assert not list(shm_dir.glob("*/*"))
    for mine in rounds:
        assert sum(r["branches"] > 0 and len(r["depths"]) > 0 for r in mine) > 10
    backups = [sum(r["backup"] > r["start"] for r in mine) for mine in rounds]
    assert backups[0] > 0
    assert backups[1] == 0


def test_rejection_takes_distributions_from_the_worker_that_made_them(
    pair: tuple[Path, Path], alone: dict[str, list[list[int]]], tmp_path: Path, shm_dir: Path
) -> None:
    same = (pair[0], pair[0])  # a draft equal to the target is refused only by the wrong q
    extra = [*TWO, "--rule", "rejection", "--backup", "jit"]
    with pipeline(same, tmp_path, shm_dir, "ssd", *extra) as run:
        assert [run.generate(prompt) for prompt in PROMPTS] == alone["greedy"]
        answers = run.together(PROMPTS, temperature=1.0, seed=3)
        assert [len(answer) for answer in answers] == [TOKENS] * len(PROMPTS)
        counters = run.client.status().counters
    assert counters["hits"] > 0
    assert counters["accepted"] > 0.97 * counters["drafted"] > 0


def test_without_one_of_its_workers_the_draft_is_left_out_until_it_is_back(
    pair: tuple[Path, Path], alone: dict[str, list[list[int]]], tmp_path: Path, shm_dir: Path
) -> None:
    with pipeline(pair, tmp_path, shm_dir, "ssd", "--draft-workers", "2") as run:
        stream = run.client.stream(
            token_ids=encode("endless"), params=SamplingParams(max_tokens=190, ignore_eos=True)
        )
        next(stream)
        os.kill(run.facts["pids"]["draft-1"], signal.SIGKILL)
        assert sum(len(chunk.token_ids) for chunk in stream) == 189
        assert run.client.status().degraded.startswith("draft-1: ")
        assert run.generate(PROMPTS[1]) == alone["greedy"][1]
        wait_for(lambda: not run.client.status().degraded, START)
        before = run.client.status().counters
        assert [run.generate(prompt) for prompt in PROMPTS] == alone["greedy"]
        after = run.client.status().counters
        served = [c["hits"] + c["backup_jit"] for c in (before, after)]
        assert served[1] > served[0]
        assert after["free_blocks"] == after["total_blocks"]
    assert run.process.returncode == 0
    assert not list(shm_dir.glob("*/*"))


def test_the_loss_of_a_draft_that_is_needed_ends_the_group(
    pair: tuple[Path, Path], tmp_path: Path, shm_dir: Path
) -> None:
    extra = ["--draft-workers", "2", "--set", "run.on_draft_failure=fail"]
    with pipeline(pair, tmp_path, shm_dir, "ssd", *extra) as run:
        os.kill(run.facts["pids"]["draft-1"], signal.SIGKILL)
        output, _ = run.process.communicate(timeout=START)
    assert run.process.returncode != 0
    assert "draft-1" in output
    for pid in run.facts["pids"].values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not list(shm_dir.glob("*/*"))


def test_replayed_acceptance_follows_the_file_and_is_labelled(
    pair: tuple[Path, Path], tmp_path: Path, shm_dir: Path
) -> None:
    trace = tmp_path / "trace.json"
    accepted = [3, 0, 1, 3, 2]
    rounds = [{"accepted": a, "hit": True, "chain": 3} for a in accepted]
    trace.write_text(json.dumps({"k": 3, "pair": "p", "temperature": 0, "rounds": rounds}))
    extra = ["--k", "3", "--synthetic-acceptance", str(trace)]
    with pipeline(pair, tmp_path, shm_dir, "sd", *extra) as run:
        # The first token takes no round of the file, then come the pieces of three times through.
        tokens = 1 + 3 * sum(a + 1 for a in accepted)
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        with run.client.stream(token_ids=encode("abc"), params=params) as stream:
            chunks = list(stream)
        pieces = [len(chunk.token_ids) for chunk in chunks if chunk.token_ids]
        status = run.client.status()
    assert pieces == [1, *[a + 1 for a in accepted] * 3]
    assert status.synthetic == str(trace)
    metrics = chunks[-1].metrics
    assert metrics is not None
    assert metrics.synthetic


def test_names_threads_and_cores_are_divided() -> None:
    two = load(None, {"draft.workers": 2, "draft.cpus": [4, 5, 6, 7, 8]})
    assert process_names(two, "draft") == ["draft-0", "draft-1"]
    assert [worker_cores(two, two.draft.cpus, rank) for rank in range(2)] == [[4, 5], [6, 7]]
    assert thread_count(two, "draft", 16) == 2
    assert process_names(load(None, {"draft.workers": 2, "mode": "sd"}), "draft") == ["draft"]
    assert process_names(load(None, {"mode": "ar"}), "draft") == []
    assert process_name(load(None, {}), "draft") == "draft"
    few = load(None, {"draft.workers": 4, "draft.cpus": [1, 2]})
    assert worker_cores(few, [1, 2], 3) == [1, 2]
    cpus = load(None, {"draft.workers": 2, "target.device": "cpu", "draft.device": "cpu"})
    assert process_cores(cpus, "target", range(8)) == [0, 1, 2, 3]
    assert process_cores(cpus, "draft", range(8)) == [4, 5, 6, 7]
    assert process_cores(cpus, "draft", range(2)) == [1]


@pytest.mark.parametrize(
    ("cores", "workers", "target", "draft"),
    [(1, 2, 1, 1), (2, 2, 1, 1), (8, 2, 4, 2), (16, 2, 8, 4), (16, 4, 8, 2), (64, 4, 32, 8)],
)
def test_drafts_take_half_of_the_cores_at_most(
    cores: int, workers: int, target: int, draft: int
) -> None:
    config = load(None, {"draft.workers": workers})
    assert thread_count(config, "target", cores) == target
    assert thread_count(config, "draft", cores) == draft


def test_each_worker_has_channels_and_hand_overs_of_its_own() -> None:
    rule = {"speculation.rule": "rejection", "scheduler.max_model_len": 100}
    rule |= {"scheduler.max_num_seqs": 8, "scheduler.max_batched_tokens": 512}
    sizes = [shared_bytes(load(None, rule | {"draft.workers": n}), 50_000) for n in (1, 2, 3)]
    handover = 8 * 5 * 50_000 * 4
    for one, more in pairwise(sizes):
        assert handover < more - one < handover + 8 * MIB


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"draft.workers": 0}, r"draft\.workers: must be 1\.\.4, got 0"),
        ({"draft.workers": 5}, r"draft\.workers: must be 1\.\.4, got 5"),
        (
            {"draft.workers": 4, "speculation.k": 2, "speculation.fan_out": 1},
            r"speculation\.fan_out: branches in all must be 4\.\.1024, got 3",
        ),
        (
            {"draft.workers": 1, "speculation.k": 5, "speculation.fan_out": 64},
            r"speculation\.fan_out: branches in all must be 1\.\.256, got 384",
        ),
    ],
)
def test_wrong_numbers_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load(None, settings)


def test_more_workers_may_have_more_branches() -> None:
    config = load(None, {"draft.workers": 2, "speculation.fan_out": 64})
    assert config.speculation.fan_out == 64


@pytest.mark.parametrize(
    ("tp", "gpus", "taken"),
    [(4, 8, [4, 5, 6, 7]), (4, 6, [4, 5, 4, 5]), (1, 2, [1] * 4), (2, 2, [0, 1, 0, 1])],
)
def test_drafts_take_the_gpus_after_the_targets_in_turn(
    tp: int, gpus: int, taken: list[int]
) -> None:
    config = load(None, {"target.tp": tp, "draft.workers": 4})
    placed = assign(config, gpus)
    assert [placed[name] for name in process_names(config, "draft")] == taken
    assert [placed[name] for name in process_names(config, "target")] == list(range(tp))
