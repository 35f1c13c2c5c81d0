"""The acceptance rule and the sampling of each row, applied to what a forward pass gave."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from ipc.messages.sampling import NoiseKey
from ipc.messages.target import RowOutcome, StepRow
from models.transformer import Transformer
from ssd_pipe.config import Rule
from ssd_pipe.sampling import rejection, shared_noise
from ssd_pipe.sampling.logprobs import chain_logprobs
from ssd_pipe.sampling.processors import Place, TrackedRules, chain_places, processed

Proposals = Callable[[int, int, int], torch.Tensor | None]
"""(slot, hand-over number, chain length) -> draft distributions [K, V] float32, None if lost."""


@dataclass(slots=True)
class SlotState:
    """What the target keeps of one running sequence.

    ``tracked``: its processors, None without; ``logprobs``: see AddRequest.
    """

    key: NoiseKey
    tracked: TrackedRules | None = None
    logprobs: int = -1
    blocks: array[int] = field(default_factory=lambda: array("i"))

    @property
    def plain(self) -> bool:
        """Whether temperature and noise alone decide, and nothing else is asked for."""
        return self.tracked is None and self.logprobs < 0 and not self.key.filtered


class Judge:
    """Outcomes of rows of any kind.

    Args:
        proposals: what chains were drawn from (rejection rule).
        slots: the running sequences by slot, kept by the owner.
    """

    def __init__(
        self,
        model: Transformer,
        rule: Rule,
        proposals: Proposals,
        slots: Mapping[int, SlotState],
    ) -> None:
        self._model, self._rule, self._proposals, self._slots = model, rule, proposals, slots

    def hidden(self, hidden: torch.Tensor, rows: list[StepRow]) -> list[RowOutcome]:
        """hidden [sum(chain + 1), H], rows in order; empty on ranks other than 0."""
        slots = [self._slots[row.slot] for row in rows]
        special = [slot.tracked is not None or slot.logprobs >= 0 for slot in slots]
        if not any(special):
            return self._plain(hidden, rows)
        if not self._fused or all(special):
            return self._special(hidden, rows)
        # The others keep the path they would have alone, hence their exact scores.
        of_special = np.repeat(special, [row.chain + 1 for row in rows])
        parts = []
        for judge, wanted in ((self._special, True), (self._plain, False)):
            index = torch.from_numpy(np.flatnonzero(of_special == wanted)).to(hidden.device)
            some = [
                row for row, is_special in zip(rows, special, strict=True) if is_special == wanted
            ]
            parts.append(iter(judge(hidden[index], some)))
        return [next(parts[0] if is_special else parts[1]) for is_special in special]

    @property
    def _fused(self) -> bool:
        """Tokens are chosen straight from hidden states where nothing else asks for logits."""
        return self._rule == "shared_noise" and self._model.tp.size == 1

    def _plain(self, hidden: torch.Tensor, rows: list[StepRow]) -> list[RowOutcome]:
        """Rows with neither processors nor logprobs."""
        if self._fused:
            judged = shared_noise.judge_from(self._model, hidden, *self._chains(rows))
        else:
            logits = self._model.logits(hidden)
            judged = [] if logits is None else self._by_rule(logits, rows)
        return [RowOutcome(k, token) for k, token in judged]

    def _special(self, hidden: torch.Tensor, rows: list[StepRow]) -> list[RowOutcome]:
        """Rows of any kind."""
        raw = self._model.logits(hidden)
        return [] if raw is None else self.logits(raw, rows)

    def logits(self, raw: torch.Tensor, rows: list[StepRow]) -> list[RowOutcome]:
        """Rows of any kind, by the model's logits [sum(chain + 1), V]."""
        slots = [self._slots[row.slot] for row in rows]
        chains, *_ = self._chains(rows)
        first = np.cumsum([0, *(len(chain) + 1 for chain in chains)])[:-1].tolist()
        places: list[Place] = []
        for start, slot, chain in zip(first, slots, chains, strict=True):
            if slot.tracked is not None:
                places += chain_places(start, slot.tracked.rules, chain)
        judged = self._by_rule(processed(raw, places) if places else raw, rows)
        judged = [
            _within_grammar(slot, chain, *outcome)
            for slot, chain, outcome in zip(slots, chains, judged, strict=True)
        ]
        asked = [slot.logprobs for slot in slots]
        logprobs = chain_logprobs(raw, first, chains, judged, asked)
        return [
            _failed(slot) or RowOutcome(k, token, own)
            for slot, (k, token), own in zip(slots, judged, logprobs, strict=True)
        ]

    def _chains(self, rows: list[StepRow]) -> tuple[list[list[int]], list[NoiseKey], list[int]]:
        """Chains, noise keys, and the position of each chain's first token."""
        return (
            [row.tokens[len(row.tokens) - row.chain :] for row in rows],
            [self._slots[row.slot].key for row in rows],
            [row.start + len(row.tokens) - row.chain for row in rows],
        )

    def _by_rule(self, logits: torch.Tensor, rows: list[StepRow]) -> list[tuple[int, int]]:
        """The acceptance rule on logits [sum(chain + 1), V]."""
        chains, keys, starts = self._chains(rows)
        if self._rule == "shared_noise":
            kernels = self._model.backend.sampling
            return shared_noise.judge(logits, chains, keys, starts, kernels)
        q: list[torch.Tensor | None] = []
        lost = []
        for row in rows:
            handed = self._proposals(row.slot, row.handover, row.chain) if row.handover else None
            q.append(handed)
            lost.append(bool(row.handover) and handed is None)
        return rejection.judge(logits, chains, keys, starts, q, lost)


def _within_grammar(
    slot: SlotState, chain: list[int], accepted: int, token: int
) -> tuple[int, int]:
    """The outcome, ended before a token that no mask was there for; the next step begins with
    that place and fails the request, unless it has ended."""
    limit = None if slot.tracked is None else slot.tracked.rules.unmaskable
    if limit is None or accepted < limit or limit == 0:
        return accepted, token
    return limit - 1, chain[limit - 1]


def _failed(slot: SlotState) -> RowOutcome | None:
    if slot.tracked is None or not slot.tracked.rules.failure:
        return None
    return RowOutcome(0, 0, failure=slot.tracked.rules.failure)
