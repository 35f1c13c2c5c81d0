"""How text completions look on the wire."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from msgspec import UNSET, UnsetType

from procs.http.answers import Answers, Item
from procs.http.responses import Completion, CompletionChoice, Usage
from procs.http.usage import finish_reason, usage


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRenderer:
    """``echoes`` go before the answers, one for each; empty ones show nothing."""

    answers: Answers
    id: str
    model: str
    created: int
    include_usage: bool
    echoes: list[str]

    def opening(self) -> list[msgspec.Struct]:
        """The prompts, for ``echo``."""
        return [self._chunk(i, echo, None) for i, echo in enumerate(self.echoes) if echo]

    def chunk(self, item: Item) -> list[msgspec.Struct]:
        """Nothing for a chunk whose text is held back."""
        index, chunk = item
        if not chunk.text and chunk.finish_reason is None:
            return []
        return [self._chunk(index, chunk.text, chunk.finish_reason)]

    def closing(self) -> list[msgspec.Struct]:
        """The usage, if it is asked for."""
        if not self.include_usage:
            return []
        return [self._completion([], usage(self.answers))]

    def whole(self) -> Completion:
        """The response that is not streamed."""
        choices = [
            CompletionChoice(
                index=i, text=echo + answer.text, finish_reason=finish_reason(answer.finish_reason)
            )
            for i, (echo, answer) in enumerate(zip(self.echoes, self.answers.answers, strict=True))
        ]
        return self._completion(choices, usage(self.answers))

    def _chunk(self, index: int, text: str, finish: str | None) -> msgspec.Struct:
        choice = CompletionChoice(index=index, text=text, finish_reason=finish_reason(finish))
        return self._completion([choice], None if self.include_usage else UNSET)

    def _completion(
        self, choices: list[CompletionChoice], used: Usage | UnsetType | None
    ) -> Completion:
        return Completion(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=used,
        )
