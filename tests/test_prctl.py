"""The settings a process makes of itself, seen from outside."""

from __future__ import annotations

import subprocess
import sys

TIMEOUT = 20  # seconds
TITLED = """
from ssd_pipe.prctl import set_title
set_title("ssd-scheduler-and-more")
print(open("/proc/self/comm").read(), end="")
"""
DESERTED = f"""
import os, signal
from ssd_pipe.prctl import end_with_parent
reading, writing = os.pipe()
if os.fork() == 0:
    signal.alarm({2 * TIMEOUT})
    print(end_with_parent(), flush=True)
    os.write(writing, b".")
    signal.pause()
os.read(reading, 1)
print(os.getpid())
"""


def test_the_title_is_cut_to_what_the_kernel_keeps() -> None:
    assert run(TITLED) == "ssd-scheduler-a\n"


def test_a_child_ends_with_its_parent() -> None:
    told, parent = run(DESERTED).split()  # both write to the pipe: it ends when the child has
    assert told == parent


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT, check=True
    )
    return done.stdout
