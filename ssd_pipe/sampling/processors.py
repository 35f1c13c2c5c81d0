"""Logit bias, min_tokens, penalties, words, ids and grammar, at any place of a chain or branch.

A row of logits belongs to a sequence and to the tokens supposed to follow its committed ones. The
order is that of vLLM's v1 sampler: bias, then stop ids under min_tokens, then penalties
(repetition over prompt and output; frequency and presence over the output), all before the
temperature; what makes tokens impossible (bad words, all but the allowed ids, the grammar's mask)
may come at any time. Only the few tokens that change are touched.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ipc.messages.sampling import Processors
from ssd_pipe.sampling.edits import Edits
from ssd_pipe.sampling.grammar import Grammars, GrammarState, Unmaskable


class SequenceRules:
    """The processors of one sequence and what they need to know of its committed tokens.

    Attributes:
        settings: what is to be done.
        length: committed tokens, prompt included.
        grammar: its place in the grammar, None without one.
        failure: why nothing can follow the committed tokens; empty if all is well.
        unmaskable: length of the shortest suffix looked at since the last commit after which the
            grammar cannot say what may come, None without one. Nothing may be emitted there.
    """

    def __init__(self, settings: Processors, grammars: Grammars | None) -> None:
        self.settings = settings
        self.length = 0
        self.grammar: GrammarState | None = None
        self.failure = ""
        self.unmaskable: int | None = None
        if settings.grammar and grammars is not None:
            self.grammar = grammars.start(settings.grammar)
        elif settings.grammar:
            self.failure = "this process has no grammars"
        self._counts = TokenCounts()
        self._bias_ids = np.array([t for t, _ in settings.logit_bias], np.int64)
        self._bias = np.array([value for _, value in settings.logit_bias], np.float32)
        self._stops = np.array(settings.stop_ids, np.int64)
        self._allowed = np.array(settings.allowed, np.int64)
        self._allowed_before_stops = np.setdiff1d(self._allowed, self._stops)
        self._reach = max((len(word) - 1 for word in settings.bad), default=0)
        self._tail: list[int] = []  # of the output, as long as a bad word may reach back

    def commit(self, tokens: Sequence[int]) -> None:
        """Take in the tokens that follow the first ``length``."""
        settings = self.settings
        self.unmaskable = None
        prompt = max(0, min(len(tokens), settings.prompt_len - self.length))
        output = tokens[prompt:]
        self.length += len(tokens)
        if settings.penalises:
            if settings.repetition_penalty != 1:
                self._counts.add(tokens[:prompt], 0)
            self._counts.add(output, 1)
        if self._reach:
            tail = [*self._tail, *output]
            self._tail = tail[max(0, len(tail) - self._reach) :]
        if self.grammar is not None and output:
            self.grammar.commit(output)
            self.failure = self.grammar.failure

    def collect(self, edits: Edits, row: int, suffix: Sequence[int], masked: bool = True) -> None:
        """Add to ``edits`` what happens to logits ``row``, which follows ``suffix``."""
        settings = self.settings
        if settings.logit_bias:
            edits.bias(row, self._bias_ids, self._bias)
        goes_on = self.length - settings.prompt_len + len(suffix) < settings.min_tokens
        if goes_on:
            edits.ban(row, self._stops)
        if settings.bad and (endings := self._endings(suffix)):
            edits.ban(row, np.array(endings, np.int64))
        if settings.allowed:
            edits.allow(row, self._allowed_before_stops if goes_on else self._allowed)
        if settings.penalises:
            edits.penalise(row, *self._counts.after(suffix), settings)
        if masked and self.grammar is not None:
            try:
                mask = self.grammar.mask(suffix)
            except Unmaskable:
                self.failure = self.grammar.failure
                if self.unmaskable is None or len(suffix) < self.unmaskable:
                    self.unmaskable = len(suffix)
                return
            if mask is not None:
                edits.mask(row, mask)

    def _endings(self, suffix: Sequence[int]) -> list[int]:
        """The tokens that would complete a bad word."""
        past = (*self._tail, *suffix)
        return [
            word[-1]
            for word in self.settings.bad
            if len(word) <= len(past) + 1 and past[len(past) - len(word) + 1 :] == word[:-1]
        ]


class TokenCounts:
    """Distinct tokens of a text and how often each occurs in its output part."""

    def __init__(self) -> None:
        self._at: dict[int, int] = {}
        self._ids = np.empty(64, np.int64)
        self._counts = np.zeros(64, np.float32)

    def add(self, tokens: Sequence[int], times: int) -> None:
        """Count each of ``tokens`` ``times``; 0 makes them known only."""
        for token in tokens:
            at = self._at.get(token)
            if at is None:
                at = self._at[token] = len(self._at)
                if at == len(self._ids):
                    self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
                    self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
                self._ids[at] = token
            self._counts[at] += times

    def after(self, suffix: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """(ids int64 [D], output counts float32 [D]) with the output ``suffix`` added."""
        known = len(self._at)
        ids, counts = self._ids[:known], self._counts[:known]
        if not suffix:
            return ids, counts
        counts = counts.copy()
        new: dict[int, int] = {}
        for token in suffix:
            at = self._at.get(token)
            if at is None:
                new[token] = new.get(token, 0) + 1
            else:
                counts[at] += 1
        if new:
            ids = np.append(ids, np.fromiter(new.keys(), np.int64))
            counts = np.append(counts, np.fromiter(new.values(), np.float32))
        return ids, counts


class Place(NamedTuple):
    """A row of logits: its index, the sequence's rules, the tokens after the committed ones."""

    row: int
    rules: SequenceRules
    suffix: Sequence[int]


def chain_places(row: int, rules: SequenceRules, chain: Sequence[int]) -> list[Place]:
    """The K + 1 rows from ``row`` on that judge, or fork at, a chain of K tokens."""
    return [Place(row + i, rules, chain[:i]) for i in range(len(chain) + 1)]


@torch.inference_mode()
def processed(
    logits: torch.Tensor,
    places: Sequence[Place],
    mask_seconds: float | None = None,
    overwrite: bool = False,
) -> torch.Tensor:
    """Logits after the processors: float [N, V] -> float32 [N, V].

    Args:
        logits: raw.
        places: the rows that have processors, in any order.
        mask_seconds: grammar masks are left out when they have taken so long; for proposals only.
        overwrite: change the argument if that saves a copy; else it stays as it is.
    """
    edits = Edits()
    deadline = None if mask_seconds is None else time.monotonic() + mask_seconds
    for row, rules, suffix in places:
        masked = deadline is None or time.monotonic() < deadline
        rules.collect(edits, row, suffix, masked)
    out = logits.float()
    if not overwrite and out.data_ptr() == logits.data_ptr():
        out = out.clone()
    edits.apply(out)
    return out


class TrackedRules:
    """A sequence's rules on the target, which sees tokens as they are fed and learns from the next
    feed how many of a chain were accepted."""

    def __init__(
        self, settings: Processors, grammars: Grammars | None, tokens: Sequence[int]
    ) -> None:
        """``tokens``: committed ones that will not be fed."""
        self.rules = SequenceRules(settings, grammars)
        self._written = array("q", tokens)

    def feed(self, start: int, tokens: Sequence[int], chain: int) -> None:
        """``tokens`` go to positions from ``start``; all but the last ``chain`` are committed."""
        del self._written[start:]
        self._written.extend(tokens)
        end = start + len(tokens) - chain
        self.rules.commit(self._written[self.rules.length : end])
