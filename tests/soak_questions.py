"""What random clients ask, and what they hold to be right."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import httpx

from ssd_pipe.async_client import AsyncClient
from ssd_pipe.client import Result
from ssd_pipe.params import SamplingParams

LONG = SamplingParams(max_tokens=400, ignore_eos=True, temperature=1.0)
GREEDY = {"temperature": 0.0}  # over HTTP it is 1 unless told
QUESTIONS: list[tuple[str, dict[str, Any]]] = [
    ("greedy", GREEDY | {"max_tokens": 30, "ignore_eos": True}),
    ("sampled 🙂", {"max_tokens": 40, "temperature": 1.0, "seed": 5, "ignore_eos": True}),
    ("filtered", {"max_tokens": 30, "temperature": 0.9, "top_p": 0.8, "top_k": 50, "seed": 6}),
    ("a prompt of several chunks " * 8, {"max_tokens": 20, "temperature": 0.5, "seed": 1}),
    ("penalties", GREEDY | {"max_tokens": 30, "repetition_penalty": 1.3, "frequency_penalty": 0.4}),
    (
        "stops",
        GREEDY | {"max_tokens": 60, "stop": ["a", "e "], "min_tokens": 3, "ignore_eos": True},
    ),
    ("bias", GREEDY | {"max_tokens": 25, "logit_bias": {70: 5.0}, "stop_token_ids": [71]}),
    (
        "shape",
        GREEDY
        | {"max_tokens": 40, "response_format": {"type": "regex", "regex": "[a-f]{4,9}-[0-9]+"}},
    ),
]
AMPLE = 25.0  # seconds in which a question is answered, whatever else goes on
EXPIRED = "out of time"
"""What ``done`` counts requests under that were told so."""


def params(settings: dict[str, Any]) -> SamplingParams:
    """Settings as the HTTP API takes them, as ours."""
    tuples = {k: tuple(settings[k]) for k in ("stop", "stop_token_ids") if k in settings}
    return SamplingParams(**settings | tuples)


class Asking:
    """What every action has. ``done`` counts them, ``wrong`` holds what must not have happened."""

    _client: AsyncClient
    _http: httpx.AsyncClient

    def __init__(self, seed: int) -> None:
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._random = random.Random(seed)
        self._answers: list[Result] = []

    def _expect(self, good: bool, what: str) -> None:
        if not good:
            self.wrong.append(what)

    def _question(self) -> tuple[str, dict[str, Any], Result]:
        number = self._random.randrange(len(QUESTIONS))
        return *QUESTIONS[number], self._answers[number]

    def _check(self, prompt: str, result: Result, expected: Result) -> None:
        same = (result.text, result.token_ids, result.finish_reason) == (
            expected.text,
            expected.token_ids,
            expected.finish_reason,
        )
        self._expect(same, f"{prompt!r}: {result} instead of {expected}")

    def _moment(self) -> float:
        """Seconds in which a long answer seldom comes, sometimes not even its turn."""
        return self._random.choice((0.001, 0.02, 0.1, 0.4))
