"""What both kinds of answer say at their end."""

from __future__ import annotations

from typing import Literal

from procs.http.answers import Answers
from procs.http.responses import PromptTokensDetails, Usage


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
