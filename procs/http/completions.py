"""How text completions look on the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from msgspec import UNSET, UnsetType

from ipc.messages.client import TokenLogprob
from procs.http.answers import Answers, Item
from procs.http.logprobs import CompletionLogprobWriter
from procs.http.responses import Completion, CompletionChoice, Usage
from procs.http.usage import Reporting, finish_reason, usage


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRenderer:
    """One request's answers as text completion objects.

    Attributes:
        echoes: what goes before each answer; nothing where empty.
        writers: for each answer, if log probabilities were asked for.
        token_ids: whether choices carry them; then a chunk whose text is held back is sent, too.
    """

    answers: Answers
    id: str
    model: str
    created: int
    reporting: Reporting
    echoes: list[str]
    writers: list[CompletionLogprobWriter]
    token_ids: bool = False

    def opening(self) -> list[msgspec.Struct]:
        """The prompts, for ``echo``."""
        return [self._chunk(i, 0, echo, None) for i, echo in enumerate(self.echoes) if echo]

    def chunk(self, item: Item) -> list[msgspec.Struct]:
        """Nothing for a chunk that has nothing to show: its text is held back."""
        index, chunk = item
        ids = chunk.token_ids if self.token_ids else ()
        if not (chunk.text or chunk.logprobs or chunk.finish_reason or ids):
            return []
        tokens = len(self.answers.answers[index].token_ids)
        return [self._chunk(index, tokens, chunk.text, chunk.finish_reason, chunk.logprobs, ids)]

    def closing(self) -> list[msgspec.Struct]:
        """The usage, if it is asked for."""
        if not self.reporting.at_end:
            return []
        return [self._completion([], usage(self.answers))]

    def whole(self) -> Completion:
        """The response that is not streamed."""
        choices = [
            self._choice(
                i, echo + answer.text, answer.finish_reason, answer.logprobs, answer.token_ids
            )
            for i, (echo, answer) in enumerate(zip(self.echoes, self.answers.answers, strict=True))
        ]
        return self._completion(choices, usage(self.answers))

    def _chunk(
        self,
        index: int,
        tokens: int,
        text: str,
        finish: str | None,
        logprobs: Sequence[TokenLogprob] = (),
        token_ids: Sequence[int] = (),
    ) -> Completion:
        choice = self._choice(index, text, finish, logprobs, token_ids)
        return self._completion([choice], self.reporting.within(self.answers, index, tokens))

    def _choice(
        self,
        index: int,
        text: str,
        finish: str | None,
        logprobs: Sequence[TokenLogprob],
        token_ids: Sequence[int],
    ) -> CompletionChoice:
        return CompletionChoice(
            index=index,
            text=text,
            finish_reason=finish_reason(finish),
            logprobs=self.writers[index].write(logprobs) if self.writers and logprobs else None,
            token_ids=list(token_ids) if self.token_ids else UNSET,
        )

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
