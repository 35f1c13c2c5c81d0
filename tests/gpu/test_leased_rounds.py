"""Rounds without the host on two GPUs: memory two processes share, whole pipelines, dead peers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

if torch.cuda.device_count() < 2:
    pytest.skip("needs two CUDA devices", allow_module_level=True)
if not torch.cuda.can_device_access_peer(0, 1):
    pytest.skip("the two GPUs cannot reach each other", allow_module_level=True)
if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from ipc.segments import Segment
from models.cuda.ipc_memory import DeviceMemory, register_host, unregister_host
from models.cuda.rounds.clock import write_clock
from ssd_pipe.errors import PeerLost, RequestError, ResourceError
from ssd_pipe.params import SamplingParams
from tests.test_pipeline import PROMPTS, Pipeline, encode, pipeline

GPUS = ("--set", "target.device=cuda:0", "--set", "draft.device=cuda:1")
CHILD = """
import sys, numpy as np, torch
from models.cuda.ipc_memory import DeviceMemory
memory = DeviceMemory.open(bytes.fromhex(sys.argv[1]), 4096, torch.device("cuda", 1))
seen = memory.read(8)
memory.write(seen * 2)
memory.close()
"""


def test_another_process_reads_and_writes_device_memory() -> None:
    memory = DeviceMemory.allocate(4096, torch.device("cuda", 0))
    assert not memory.read(512).any()
    memory.write(np.arange(8))
    command = [sys.executable, "-c", CHILD, memory.handle().hex()]
    subprocess.run(command, check=True, timeout=120, cwd=Path(__file__).parents[2])
    assert memory.read(8).tolist() == list(range(0, 16, 2))
    memory.close()
    memory.close()


def test_errors_have_a_name_and_do_not_stay() -> None:
    with pytest.raises(ResourceError, match="cudaIpcOpenMemHandle"):
        DeviceMemory.open(bytes(64), 4096, torch.device("cuda", 1))
    assert torch.ones(3, device="cuda:1").sum().item() == 3


def test_a_gpu_writes_registered_shared_memory(tmp_path: Path) -> None:
    segment = Segment.create(Path("/dev/shm") / f"ssd-test-{os.getpid()}", 4096)
    try:
        words = np.frombuffer(segment.map, np.int64)
        mapped = register_host(words, torch.device("cuda", 0))
        write_clock(mapped[3:4], torch.empty(1, device="cuda:0"))
        torch.cuda.synchronize(0)
        assert words[3] > 0
        assert words[2] == words[4] == 0
        unregister_host(words)
    finally:
        segment.path.unlink()


@contextmanager
def leased(pair: tuple[Path, Path], tmp_path: Path, *more: str) -> Iterator[Pipeline]:
    shm = Path("/dev/shm") / f"ssd-tests-{os.getpid()}"
    shm.mkdir(exist_ok=True)
    mode = "ar" if "target.pad_steps=true" in more else "ssd"
    with pipeline(pair, tmp_path, shm, mode, *GPUS, *more) as run:
        yield run


def events(tmp_path: Path, name: str, process: str = "target-0") -> list[dict[str, Any]]:
    files = sorted((tmp_path / "logs").rglob(f"{process}.jsonl"))
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [line for line in lines if line.get("event") == name]


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.9, "seed": 5}], ids=["greedy", "T"])
def test_leased_scheduled_and_plain_decoding_give_the_same_tokens(
    pair: tuple[Path, Path], tmp_path: Path, settings: dict[str, Any]
) -> None:
    settings = settings | {"max_tokens": 100}
    answers, counters = [], []
    for i, more in enumerate(
        (
            ("--set", "target.pad_steps=true"),
            ("--set", "speculation.leased_rounds=false"),
            (),
            ("--backup", "ngram"),
        )
    ):
        folder = tmp_path / str(i)
        folder.mkdir()
        with leased(pair, folder, *more) as run:
            answers.append([run.generate(prompt, **settings) for prompt in PROMPTS])
            answers.append(run.together(PROMPTS, **settings))
            status = run.client.status()
            counters.append(status.counters)
            assert status.running == status.waiting == 0
            assert status.counters["free_blocks"] == status.counters["total_blocks"]
        rounds = [e for e in events(folder, "verify") if e.get("leased")]
        assert bool(rounds) is (i >= 2)
    assert all(answer == answers[0] for answer in answers[1:])
    assert counters[2]["hits"] > 0.5 * counters[1]["hits"] > 0


def test_requests_join_stop_and_leave_within_leases(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    with leased(pair, tmp_path) as run:
        alone = run.generate(PROMPTS[0], max_tokens=150)
        stop = alone[60]
        for _ in range(4):
            with run.client.stream(
                token_ids=encode("endless"), params=SamplingParams(max_tokens=180, ignore_eos=True)
            ) as stream:
                next(stream)
                assert run.generate(PROMPTS[0], max_tokens=150) == alone
        stopped = run.generate(PROMPTS[0], max_tokens=150, stop_token_ids=(stop,))
        assert stopped == alone[: alone.index(stop) + 1]
        biased = run.generate(PROMPTS[0], max_tokens=30, logprobs=1)
        assert biased == alone[:30]
        counters = run.client.status().counters
        assert counters["free_blocks"] == counters["total_blocks"]
    assert any(e.get("leased") for e in events(tmp_path, "verify"))


@pytest.mark.parametrize("victim", ["draft", "target-0", "scheduler"])
def test_a_killed_process_leaves_no_gpu_waiting(
    victim: str, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    with leased(pair, tmp_path, "--set", "run.on_draft_failure=fail") as run:
        stream = run.client.stream(
            token_ids=encode("endless"), params=SamplingParams(max_tokens=190, ignore_eos=True)
        )
        next(stream)
        os.kill(run.facts["pids"][victim], signal.SIGKILL)
        with pytest.raises((PeerLost, RequestError)):
            for _ in stream:
                pass
        run.process.communicate(timeout=40)
    assert run.process.returncode != 0
    for device in range(2):
        assert torch.ones(8, device=f"cuda:{device}").sum().item() == 8


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
def test_a_lost_draft_costs_no_token_and_leases_again_when_it_is_back(
    fault: signal.Signals, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    with leased(pair, tmp_path) as run:
        alone = run.generate("endless", max_tokens=180)
        pid = run.facts["pids"]["draft"]
        with run.client.stream(
            token_ids=encode("endless"), params=SamplingParams(max_tokens=180, ignore_eos=True)
        ) as stream:
            tokens = list(next(stream).token_ids)
            os.kill(pid, fault)
            for chunk in stream:
                tokens += chunk.token_ids
        assert tokens == alone
        assert run.client.status().counters["draft_losses"] == 1
        if fault == signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
        deadline = time.monotonic() + 60
        while run.client.status().degraded and time.monotonic() < deadline:
            assert run.generate("a", max_tokens=20)
        before = len([e for e in events(tmp_path, "verify") if e.get("leased")])
        assert run.generate("endless", max_tokens=180) == alone
        after = len([e for e in events(tmp_path, "verify") if e.get("leased")])
        assert after > before
        counters = run.client.status().counters
        assert counters["free_blocks"] == counters["total_blocks"]


def test_adaptive_speculation_leases_rounds_and_tries_other_efforts(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    answers, folders = [], [tmp_path / "plain", tmp_path / "adaptive"]
    for folder, more in zip(
        folders, (("--set", "target.pad_steps=true"), ("--adaptive",)), strict=True
    ):
        folder.mkdir()
        with leased(pair, folder, *more) as run:
            answers.append([run.generate(prompt, max_tokens=150) for prompt in PROMPTS])
            answers.append(run.together(PROMPTS[:4], max_tokens=150))
            counters = run.client.status().counters
            assert counters["free_blocks"] == counters["total_blocks"]
    assert answers[2:] == answers[:2]
    assert any(e.get("leased") for e in events(folders[1], "verify"))
    # Plain decoding is what it tries first, and that is never leased.
    assert counters["probes"] > 0
    assert min(counters["steps_plain"], counters["steps_parallel"]) > 0


def test_several_drafts_go_through_the_scheduler_and_say_why(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    answers = []
    for name, more in (
        ("alone", ("--set", "target.pad_steps=true")),
        ("two", ("--draft-workers", "2", "--fan-out", "3")),
    ):
        folder = tmp_path / name
        folder.mkdir()
        with leased(pair, folder, *more) as run:
            answers.append([run.generate(prompt, max_tokens=100) for prompt in PROMPTS])
            counters = run.client.status().counters
            processes = set(run.facts["pids"])
    assert answers[0] == answers[1]
    assert {"draft-0", "draft-1"} < processes
    assert counters["hits"] > 0
    assert counters["free_blocks"] == counters["total_blocks"]
    for process in ("target-0", "draft-0", "draft-1"):
        [said] = events(tmp_path / "two", "leased rounds", process)
        assert not said["possible"]
        assert "several draft workers" in said["reason"]
    assert not any(e.get("leased") for e in events(tmp_path / "two", "verify"))


def test_sixty_four_sequences_start_and_are_leased_together(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    more = ("--max-num-seqs", "64", "--set", "scheduler.max_batched_tokens=512")
    with leased(pair, tmp_path, *more) as run:
        alone = [run.generate(prompt, max_tokens=150) for prompt in PROMPTS]
        assert run.together((PROMPTS * 13)[:64], max_tokens=150) == (alone * 13)[:64]
        counters = run.client.status().counters
        assert counters["free_blocks"] == counters["total_blocks"]
    assert max(e["rows"] for e in events(tmp_path, "verify") if e.get("leased")) > 8
