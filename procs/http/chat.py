"""How chat completions look on the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from msgspec import UNSET, UnsetType

from ipc.messages.client import TokenLogprob
from procs.http.answers import Answers, Item
from procs.http.logprobs import chat_logprobs
from procs.http.responses import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    Delta,
    Usage,
)
from procs.http.usage import finish_reason, usage


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRenderer:
    """One request's answers as chat completion objects."""

    answers: Answers
    id: str
    model: str
    created: int
    include_usage: bool
    with_logprobs: bool

    def opening(self) -> list[msgspec.Struct]:
        """Who speaks."""
        delta = Delta(role="assistant", content="")
        return [self._chunk(i, delta) for i in range(len(self.answers.answers))]

    def chunk(self, item: Item) -> list[msgspec.Struct]:
        """The text, if any, then the finish reason in an object of its own."""
        index, chunk = item
        events: list[msgspec.Struct] = []
        if chunk.text or chunk.logprobs:
            events.append(self._chunk(index, Delta(content=chunk.text), logprobs=chunk.logprobs))
        if chunk.finish_reason is not None:
            events.append(self._chunk(index, Delta(), chunk.finish_reason))
        return events

    def closing(self) -> list[msgspec.Struct]:
        """The usage, if it is asked for."""
        return [self._event([], usage(self.answers))] if self.include_usage else []

    def whole(self) -> ChatCompletion:
        """The response that is not streamed."""
        return ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=[
                ChatChoice(
                    index=i,
                    message=AnswerMessage(content=answer.text),
                    finish_reason=finish_reason(answer.finish_reason) or "stop",
                    logprobs=chat_logprobs(answer.logprobs) if self.with_logprobs else None,
                )
                for i, answer in enumerate(self.answers.answers)
            ],
            usage=usage(self.answers),
        )

    def _chunk(
        self,
        index: int,
        delta: Delta,
        finish: str | None = None,
        logprobs: Sequence[TokenLogprob] = (),
    ) -> ChatChunk:
        choice = ChatChunkChoice(
            index=index,
            delta=delta,
            finish_reason=finish_reason(finish),
            logprobs=chat_logprobs(logprobs) if self.with_logprobs and logprobs else None,
        )
        return self._event([choice], None if self.include_usage else UNSET)

    def _event(self, choices: list[ChatChunkChoice], used: Usage | UnsetType | None) -> ChatChunk:
        return ChatChunk(
            id=self.id, created=self.created, model=self.model, choices=choices, usage=used
        )
