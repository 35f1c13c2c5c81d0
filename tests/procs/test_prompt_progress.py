"""How far a long prompt has been read is logged now and then."""

from __future__ import annotations

from typing import cast

from structlog.testing import CapturingLogger
from structlog.typing import FilteringBoundLogger

from ipc.messages.sampling import NoiseKey
from procs.prompt_progress import PERIOD_NS, PromptProgress
from ssd_pipe.engine.blocks import BlockTable
from ssd_pipe.engine.request import Request
from ssd_pipe.engine.step import Row

CHUNK = 128
STEP_NS = PERIOD_NS // 4


def chunk(rid: int, start: int, begun: int, length: int = 100 * CHUNK, sample: bool = False) -> Row:
    request = Request(
        rid=rid,
        tokens=[0] * length,
        prompt_len=length,
        limit=length + 1,
        key=NoiseKey(),
        stop_ids=frozenset(),
        arrived_ns=begun,
        prefix_hash=0,
        table=BlockTable(),
        scheduled_ns=begun,
    )
    return Row(request, start, CHUNK, sample, False)


def test_a_line_each_period_and_not_each_chunk() -> None:
    log = CapturingLogger()
    progress = PromptProgress(cast(FilteringBoundLogger, log))
    began = 7 * PERIOD_NS
    for step in range(13):
        progress.note([chunk(1, step * CHUNK, began)], began + step * STEP_NS)
    told = [(call.method_name, call.args, call.kwargs) for call in log.calls]
    assert told == [
        ("info", ("prompt",), {"rid": 1, "read": read * CHUNK, "prompt_tokens": 100 * CHUNK})
        for read in (5, 9, 13)
    ]


def test_all_that_are_late_are_told_of_and_no_others() -> None:
    log = CapturingLogger()
    progress = PromptProgress(cast(FilteringBoundLogger, log))
    now = 9 * PERIOD_NS
    late = [chunk(rid, 0, now - 2 * PERIOD_NS) for rid in (1, 2)]
    decoding = chunk(3, 0, now - 2 * PERIOD_NS, sample=True)
    progress.note([*late, decoding, chunk(4, 0, now - 1)], now)
    assert [call.kwargs["rid"] for call in log.calls] == [1, 2]
