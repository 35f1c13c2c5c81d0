"""What both kinds of answer say of their tokens, and why they end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from msgspec import UNSET, UnsetType

from procs.http.answers import Answers
from procs.http.responses import PromptTokensDetails, Usage
from procs.http.schemas import StreamOptions


@dataclass(frozen=True, slots=True)
class Reporting:
    """How much of the usage a stream tells.

    Attributes:
        at_end: in an event of its own.
        always: in every event, for the answer it is about.
    """

    at_end: bool = False
    always: bool = False

    @classmethod
    def of(cls, options: StreamOptions | None) -> Reporting:
        if options is None or not options.include_usage:
            return cls()
        return cls(True, bool(options.continuous_usage_stats))

    def within(self, answers: Answers, index: int, tokens: int) -> Usage | UnsetType | None:
        """What an event says of an answer that has ``tokens`` so far.

        None where nothing is known yet, and as OpenAI has it before the usage at the end.
        """
        prompt = answers.prompt_tokens_of(index) if self.always else 0
        if not prompt:
            return None if self.at_end else UNSET
        return Usage(prompt_tokens=prompt, completion_tokens=tokens, total_tokens=prompt + tokens)


def usage(answers: Answers) -> Usage:
    """Tokens of complete answers."""
    prompt, cached = answers.prompt_tokens()
    output = answers.output_tokens()
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=output,
        total_tokens=prompt + output,
        prompt_tokens_details=PromptTokensDetails(cached),
    )


def finish_reason(reason: str | None) -> Literal["stop", "length"] | None:
    """The pipeline's reason as the API's; None while there is none."""
    if not reason:
        return None
    return "length" if reason == "length" else "stop"
