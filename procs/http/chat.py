"""How chat completions look on the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET, UnsetType

from ipc.messages.client import Chunk, TokenLogprob
from procs.http.answers import Answer, Answers, Item
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
from procs.http.usage import Reporting, finish_reason, usage
from ssd_pipe.text.thinking import Said, ThoughtSplitter


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRenderer:
    """One request's answers as chat completion objects.

    Attributes:
        separate_reasoning: tell thoughts apart from the text, if the model's template knows any.
    """

    answers: Answers
    id: str
    model: str
    created: int
    reporting: Reporting
    with_logprobs: bool
    separate_reasoning: bool = True
    _splitters: dict[int, ThoughtSplitter] = field(default_factory=dict)

    def opening(self) -> list[msgspec.Struct]:
        """Who speaks."""
        delta = Delta(role="assistant", content="")
        used = [self.reporting.within(self.answers, i, 0) for i in range(len(self.answers.answers))]
        return [self._chunk(i, delta, used=u) for i, u in enumerate(used)]

    def chunk(self, item: Item) -> list[msgspec.Struct]:
        """The text, if any, then the finish reason in an object of its own."""
        index, chunk = item
        events: list[msgspec.Struct] = []
        said = self._split(index, chunk)
        tokens = len(self.answers.answers[index].token_ids)
        used = self.reporting.within(self.answers, index, tokens)
        if said.reasoning or said.content or chunk.logprobs:
            silent = said.reasoning and not said.content
            delta = Delta(
                content=None if silent else said.content,
                reasoning_content=said.reasoning or None,
            )
            events.append(self._chunk(index, delta, logprobs=chunk.logprobs, used=used))
        if chunk.finish_reason is not None:
            events.append(self._chunk(index, Delta(), chunk.finish_reason, used=used))
        return events

    def closing(self) -> list[msgspec.Struct]:
        """The usage, if it is asked for."""
        return [self._event([], usage(self.answers))] if self.reporting.at_end else []

    def whole(self) -> ChatCompletion:
        """The response that is not streamed."""
        return ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=[
                ChatChoice(
                    index=i,
                    message=self._message(answer),
                    finish_reason=finish_reason(answer.finish_reason) or "stop",
                    logprobs=chat_logprobs(answer.logprobs) if self.with_logprobs else None,
                )
                for i, answer in enumerate(self.answers.answers)
            ],
            usage=usage(self.answers),
        )

    def _split(self, index: int, chunk: Chunk) -> Said:
        if chunk.thinking is not None and self.separate_reasoning:
            self._splitters[index] = ThoughtSplitter(chunk.thinking)
        splitter = self._splitters.get(index)
        if splitter is None:
            return Said("", chunk.text)
        said = splitter.push(chunk.text)
        return said.then(splitter.finish()) if chunk.finish_reason is not None else said

    def _message(self, answer: Answer) -> AnswerMessage:
        if answer.thinking is None or not self.separate_reasoning:
            return AnswerMessage(content=answer.text)
        splitter = ThoughtSplitter(answer.thinking)
        said = splitter.push(answer.text).then(splitter.finish())
        return AnswerMessage(content=said.content, reasoning_content=said.reasoning or UNSET)

    def _chunk(
        self,
        index: int,
        delta: Delta,
        finish: str | None = None,
        logprobs: Sequence[TokenLogprob] = (),
        *,
        used: Usage | UnsetType | None,
    ) -> ChatChunk:
        choice = ChatChunkChoice(
            index=index,
            delta=delta,
            finish_reason=finish_reason(finish),
            logprobs=chat_logprobs(logprobs) if self.with_logprobs and logprobs else None,
        )
        return self._event([choice], used)

    def _event(self, choices: list[ChatChunkChoice], used: Usage | UnsetType | None) -> ChatChunk:
        return ChatChunk(
            id=self.id, created=self.created, model=self.model, choices=choices, usage=used
        )
