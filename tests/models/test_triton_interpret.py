"""The CUDA path's kernels under Triton's interpreter, in float32 on the CPU.

The interpreter is chosen when Triton is first imported, so the cases run in a process of their own.
Where there is a GPU, tests/gpu runs the kernels compiled.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

CASES = ("leased_cases.py", "triton_cases.py", "gated_cases.py", "first_token_cases.py")


WORKERS = 2
"""Files of cases run at once: each is one process on one core for minutes."""

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs these kernels compiled"),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[str, Future[subprocess.CompletedProcess[str]]]]:
    """Every file of cases, under way."""
    with ThreadPoolExecutor(WORKERS) as pool:
        yield {cases: pool.submit(run, cases) for cases in CASES}


def run(cases: str) -> subprocess.CompletedProcess[str]:
    path = str(Path(__file__).with_name(cases))
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", path],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.parametrize("cases", CASES)
def test_kernels_are_right_under_the_interpreter(
    cases: str, runs: dict[str, Future[subprocess.CompletedProcess[str]]]
) -> None:
    done = runs[cases].result()
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
