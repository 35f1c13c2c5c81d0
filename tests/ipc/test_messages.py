"""What messages look like on the wire: processes and clients of other versions read the same."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ipc.messages.client import (
    Alternative,
    Ask,
    Cancel,
    ChatMessage,
    Chunk,
    Failure,
    Submit,
    TokenLogprob,
)
from ipc.messages.draft import ChainReady, DraftLease, DraftPlan, DraftRow, DraftStart
from ipc.messages.hub import Beat, Hello, ProcessState, Welcome
from ipc.messages.requests import AddRequest, RequestStats, SchedulerStats, TokensOut
from ipc.messages.sampling import NoiseKey, Processors, SamplingParams
from ipc.messages.target import (
    Ahead,
    Found,
    Lease,
    Logprobs,
    RowAhead,
    RowLease,
    RowOutcome,
    SeqStart,
    StepPlan,
    StepResult,
    StepRow,
)

PLAIN_KEY = [0, 0.0, 1.0, 0, 0.0, None]
PARAMS = {
    "max_tokens": 3,
    "temperature": 0.5,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": 7,
    "ignore_eos": False,
    "stop": ["ab"],
    "stop_token_ids": [],
    "include_stop_str_in_output": False,
    "skip_special_tokens": True,
    "min_tokens": 0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": {9: 1.5},
    "allowed_token_ids": None,
    "bad_words": [],
    "logprobs": None,
    "response_format": None,
    "n": 2,
    "timeout": None,
}
PROCESS = {
    "name": "draft",
    "pid": 5,
    "state": "ready",
    "detail": "",
    "port": 0,
    "silent": 0.5,
    "notes": {"device": "cpu"},
}
WIRE: list[tuple[Any, Any]] = [
    (
        Submit(
            id="a",
            messages=(ChatMessage("user", "hé"),),
            params=SamplingParams(
                max_tokens=3, temperature=0.5, seed=7, stop=("ab",), logit_bias={9: 1.5}, n=2
            ),
        ),
        {
            "type": "submit",
            "id": "a",
            "prompt": None,
            "messages": [{"role": "user", "content": "hé"}],
            "token_ids": None,
            "params": PARAMS,
            "chat_template_kwargs": None,
            "must_fit": False,
            "add_generation_prompt": True,
            "continue_final_message": False,
        },
    ),
    (Cancel("a"), {"type": "cancel", "id": "a"}),
    (Ask("q"), {"type": "ask", "id": "q", "what": "status"}),
    (
        Failure(id="a", code=400, message="no", field="n"),
        {"type": "failure", "id": "a", "code": 400, "message": "no", "field": "n"},
    ),
    (
        Chunk(
            id="a",
            text="x",
            token_ids=(5,),
            finish_reason="stop",
            logprobs=(TokenLogprob(5, -0.5, 1, b"x", (Alternative(6, -1.0, b"y"),)),),
        ),
        {
            "type": "chunk",
            "id": "a",
            "text": "x",
            "token_ids": [5],
            "finish_reason": "stop",
            "metrics": None,
            "logprobs": [[5, -0.5, 1, b"x", [[6, -1.0, b"y"]]]],
            "index": 0,
            "accepted": 0,
            "drafted": 0,
            "accepted_text": 0,
            "thinking": None,
            "prompt_tokens": 0,
        },
    ),
    (
        Hello(name="draft", pid=5, config_digest="d"),
        {"type": "hello", "name": "draft", "pid": 5, "config_digest": "d"},
    ),
    (Welcome("r"), {"type": "welcome", "run": "r", "transport": "shm", "returning": False}),
    (Beat("draft"), {"type": "beat", "name": "draft"}),
    (
        AddRequest(1, [4, 5], 8, NoiseKey(processors=Processors(2, stop_ids=(2,))), [2], 99),
        [
            "add",
            1,
            [4, 5],
            8,
            [0, 0.0, 1.0, 0, 0.0, [2, 1.0, 0.0, 0.0, [], 0, [2], "", [], []]],
            [2],
            99,
            -1,
        ],
    ),
    (
        TokensOut(1, [4], 0, "stop", RequestStats(hits=1), [Logprobs(-0.5, 1, [4], [-0.5])]),
        ["tokens", 1, [4], 0, "stop", [0, 0, 0, 0, 0, 0, 1, 0, 0, 0], [[-0.5, 1, [4], [-0.5]]], 0],
    ),
    (
        SchedulerStats(
            3,
            {"hits": 1.0},
            [ProcessState(name="draft", pid=5, state="ready", silent=0.5, notes={"device": "cpu"})],
        ),
        ["stats", 3, {"hits": 1.0}, [PROCESS], ""],
    ),
    (
        StepPlan(
            7,
            [StepRow(0, 2, [4, 5], 1, True, [3])],
            [SeqStart(1, 0, NoiseKey())],
            [2],
            Lease(4, 8, 1, 50, 60, [RowLease(11, 20, [2], [3])]),
        ),
        [
            "plan",
            7,
            [[0, 2, [4, 5], 1, True, [3], 0]],
            [[1, 0, PLAIN_KEY, [], -1]],
            [2],
            [4, 8, 1, 50, 60, [[11, 20, [2], [3]]]],
            False,
        ],
    ),
    (
        StepResult(7, [RowOutcome(1, 6)], 10, 20, 30, 0, [Found([4], 2)], 40, 50),
        ["result", 7, [[1, 6, [], ""]], 10, 20, 30, 0, [[[4], 2]], 40, 50],
    ),
    (
        Ahead(7, 5, 3, [RowAhead(2**64 - 1, 20, [2], [3])]),
        ["ahead", 7, 5, 3, [[2**64 - 1, 20, [2], [3]]]],
    ),
    (
        DraftPlan(
            7,
            [DraftRow(0, 4, [6], [7, 8], True, 2**64 - 1)],
            [DraftStart(1, 0, NoiseKey(), [4])],
            lease=DraftLease(4, 8, -1),
        ),
        [
            "draft",
            7,
            [[0, 4, [6], [7, 8], True, 2**64 - 1, -1, 0, False, 0, 0]],
            [[1, 0, PLAIN_KEY, [4]]],
            [],
            False,
            [4, 8, -1, False],
            0,
            0,
            0,
            0,
        ],
    ),
    (ChainReady(7, 0, [7, 8]), ["chain", 7, 0, [7, 8]]),
]


@pytest.mark.parametrize(("message", "wire"), WIRE, ids=[type(m).__name__ for m, _ in WIRE])
def test_messages_on_the_wire(message: msgspec.Struct, wire: Any) -> None:
    data = msgspec.msgpack.encode(message)
    assert msgspec.msgpack.decode(data) == wire
    assert msgspec.msgpack.decode(data, type=type(message)) == message
