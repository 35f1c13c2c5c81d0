"""Whole pipelines, started as a user starts them: every mode, rule and fault."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ssd_pipe.client import Client
from ssd_pipe.errors import PeerLost, RequestError
from ssd_pipe.params import SamplingParams
from tests.pipelines import command

TOKENS = 24
PROMPTS = ["a", "def add(x, y):", "0123456789" * 4, "naïve café ☕", "x = [1, 2, 3]\ny = "]


@pytest.fixture(scope="module")
def greedy(pair: tuple[Path, Path]) -> dict[str, list[int]]:
    """transformers' own greedy tokens of PROMPTS."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(pair[0], dtype=torch.float32)
    answers = {}
    for prompt in PROMPTS:
        ids = torch.tensor([encode(prompt)])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=TOKENS,
            eos_token_id=None,
            pad_token_id=0,
        )
        answers[prompt] = out[0, ids.shape[1] :].tolist()
    return answers


def encode(prompt: str) -> list[int]:
    """Token ids of the byte model: byte-level alphabet order after three specials."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(
        prompt
    )
    return [3 + alphabet.index(c) for piece, _ in pieces for c in piece]


class Pipeline:
    """A running ``ssd-pipe up`` and a client of it."""

    def __init__(self, process: subprocess.Popen[str], facts: dict[str, Any], client: Client):
        self.process = process
        self.facts = facts
        self.client = client

    def generate(self, prompt: str, **params: Any) -> list[int]:
        params = {"max_tokens": TOKENS, "ignore_eos": True} | params
        result = self.client.generate(token_ids=encode(prompt), params=SamplingParams(**params))
        return list(result.token_ids)

    def together(self, prompts: list[str], **params: Any) -> list[list[int]]:
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.generate(prompt, **params), prompts))


@contextmanager
def pipeline(
    pair: tuple[Path, Path], tmp_path: Path, shm_dir: Path, mode: str, *arguments: str
) -> Iterator[Pipeline]:
    ready = tmp_path / f"ready-{mode}-{len(list(tmp_path.iterdir()))}.json"
    process = subprocess.Popen(
        command(
            "up",
            *("--mode", mode, "--target", str(pair[0]), "--draft", str(pair[1])),
            *("--ready-file", str(ready), "--log-dir", str(tmp_path / "logs")),
            *("--set", f"run.shm_dir={shm_dir}", "--set", "target.threads=1"),
            *("--set", "draft.threads=1", "--max-model-len", "200", "--max-num-seqs", "4"),
            *("--set", "cache.block_size=4", "--set", "scheduler.max_batched_tokens=48"),
            # With models this small speculation does not pay, and is what is tested all the same.
            *("--no-adaptive", *arguments),
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        facts = wait_for(ready, process)
        with Client(run=facts["run"], shm_dir=str(shm_dir)) as client:
            yield Pipeline(process, facts, client)
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


def wait_for(ready: Path, process: subprocess.Popen[str]) -> dict[str, Any]:
    """The ready file, read once ``up`` says on its output that it wrote it."""
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if ready.exists():
            return json.loads(ready.read_text())
    raise AssertionError("".join(seen))


@pytest.mark.parametrize("mode", ["ar", "sd", "ssd"])
def test_greedy_tokens_are_transformers(
    mode: str,
    pair: tuple[Path, Path],
    greedy: dict[str, list[int]],
    tmp_path: Path,
    shm_dir: Path,
) -> None:
    with pipeline(pair, tmp_path, shm_dir, mode) as run:
        assert [run.generate(prompt) for prompt in PROMPTS] == list(greedy.values())
        assert run.together(PROMPTS) == list(greedy.values())
        status = run.client.status()
        assert status.running == status.waiting == 0
        assert status.counters["free_blocks"] == status.counters["total_blocks"]
        if mode == "ssd":
            assert status.counters["hits"] > 0
    assert run.process.returncode == 0
    assert not list(shm_dir.glob("*/*"))


def test_sampled_tokens_are_the_same_in_every_mode_and_batch(
    pair: tuple[Path, Path], tmp_path: Path, shm_dir: Path
) -> None:
    settings = {"temperature": 0.9, "top_p": 0.95, "seed": 5}
    answers = []
    for mode, extra in (
        ("ar", []),
        ("sd", ["--k", "3"]),
        ("ssd", ["--fan-out", "2"]),
        ("ssd", ["--adaptive"]),
        ("ssd", ["--allocation", "geometric", "--backup", "ngram", "--k", "2"]),
        ("ssd", ["--tp", "2", "--set", "run.transport=zmq"]),
    ):
        with pipeline(pair, tmp_path, shm_dir, mode, *extra) as run:
            answers.append([run.generate(prompt, **settings) for prompt in PROMPTS])
            answers.append(run.together(PROMPTS, **settings))
    assert all(answer == answers[0] for answer in answers[1:])


def test_rejection_rule_runs_and_greedy_stays_greedy(
    pair: tuple[Path, Path], greedy: dict[str, list[int]], tmp_path: Path, shm_dir: Path
) -> None:
    extra = ["--rule", "rejection", "--set", "speculation.saguaro_c=0.7"]
    with pipeline(pair, tmp_path, shm_dir, "ssd", *extra) as run:
        assert [run.generate(prompt) for prompt in PROMPTS] == list(greedy.values())
        tokens = run.together(PROMPTS, temperature=1.0, seed=3)
        assert [len(answer) for answer in tokens] == [TOKENS] * len(PROMPTS)
        assert run.client.status().counters["accepted"] > 0


@pytest.mark.parametrize("victim", ["frontend", "scheduler", "target-0", "draft"])
def test_a_killed_process_ends_the_group(
    victim: str, pair: tuple[Path, Path], tmp_path: Path, shm_dir: Path
) -> None:
    strict = ("--set", "run.on_draft_failure=fail")
    with pipeline(pair, tmp_path, shm_dir, "ssd", *strict) as run:
        pids = run.facts["pids"]
        stream = run.client.stream(
            token_ids=encode("endless"), params=SamplingParams(max_tokens=190, ignore_eos=True)
        )
        next(stream)
        os.kill(pids[victim], signal.SIGKILL)
        with pytest.raises((PeerLost, RequestError)):
            for _ in stream:
                pass
        output, _ = run.process.communicate(timeout=20)
    assert run.process.returncode != 0
    assert victim in output
    for pid in pids.values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not list(shm_dir.glob("*/*"))


def test_cancelled_requests_give_their_blocks_back(
    pair: tuple[Path, Path], tmp_path: Path, shm_dir: Path
) -> None:
    with pipeline(pair, tmp_path, shm_dir, "ssd") as run:
        for _ in range(6):
            with run.client.stream(
                token_ids=encode("endless"), params=SamplingParams(max_tokens=190, ignore_eos=True)
            ) as stream:
                next(stream)
        run.generate("a")
        counters = run.client.status().counters
        assert counters["free_blocks"] == counters["total_blocks"]
        assert counters["running"] == counters["waiting"] == 0


def test_four_pipelines_side_by_side(
    pair: tuple[Path, Path], greedy: dict[str, list[int]], tmp_path: Path, shm_dir: Path
) -> None:
    def one(index: int) -> list[int]:
        folder = tmp_path / str(index)
        folder.mkdir()
        with pipeline(pair, folder, shm_dir, "ssd") as run:
            return run.generate(PROMPTS[0])

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(one, range(4))) == [greedy[PROMPTS[0]]] * 4
    assert not list(shm_dir.glob("*/*"))
