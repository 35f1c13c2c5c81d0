"""The scheduler's mail."""

from __future__ import annotations

import time

from ipc.messages.requests import AddRequest
from ipc.messages.sampling import NoiseKey
from tests.procs.conftest import Opened
from tests.procs.scheduler_process import PROMPT
from tests.waiting import WAIT


def test_nobody_sleeps_on_a_request_that_was_fetched_while_a_step_ran(
    open_process: Opened,
) -> None:
    process = open_process()
    process.mail(AddRequest(1, PROMPT, 40, NoiseKey(), [], 0))
    assert process.desk.has_mail()
    began = time.monotonic()
    process.desk.wait(WAIT)
    assert time.monotonic() - began < WAIT / 2
    process.desk.attend()
    assert process.scheduler.has_work
