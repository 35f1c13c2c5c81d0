"""The CUDA path's kernels under Triton's interpreter, in float32 on the CPU.

The interpreter is chosen when Triton is first imported, so the cases run in a process of their own.
Where there is a GPU, tests/gpu runs the kernels compiled.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

CASES = ("triton_cases.py", "first_token_cases.py", "leased_cases.py", "gated_cases.py")


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs these kernels compiled")
@pytest.mark.parametrize("cases", CASES)
def test_kernels_are_right_under_the_interpreter(cases: str) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-p",
            "no:cacheprovider",
            str(Path(__file__).with_name(cases)),
        ],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
