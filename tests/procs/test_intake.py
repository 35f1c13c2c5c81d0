from __future__ import annotations

import asyncio
import threading

import pytest
import structlog

from ipc.messages.client import Submit
from procs.intake import Intake
from ssd_pipe.errors import RequestError
from ssd_pipe.text.prepare import Prepared, Preparer
from tests.text.vocabularies import byte_level

SUBMIT = Submit(id="a", prompt="fox")


class Held(Preparer):
    """Prepares nothing before it is let go."""

    def __init__(self) -> None:
        super().__init__(byte_level(), (), 300, 100)
        self.go = threading.Event()

    def prepare(self, submit: Submit) -> Prepared:
        assert self.go.wait(30)
        return super().prepare(submit)


async def test_one_long_prompt_too_many_is_told_the_limit() -> None:
    preparer = Held()
    intake = Intake(preparer, structlog.get_logger(), max_waiting=2)
    try:
        waiting = [asyncio.ensure_future(intake.later(SUBMIT)) for _ in range(2)]
        await asyncio.sleep(0)  # both begin
        with pytest.raises(RequestError, match=r"\(scheduler\.max_waiting = 2\)") as caught:
            await intake.later(SUBMIT)
        assert caught.value.code == 429
        preparer.go.set()
        tokens = byte_level().encode("fox")
        assert [p.tokens for p in await asyncio.gather(*waiting)] == [tokens] * 2
        assert (await intake.later(SUBMIT)).tokens == tokens  # there is room again
    finally:
        preparer.go.set()
        intake.close()
