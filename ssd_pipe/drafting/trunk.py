"""One sequence as the draft sees it: committed tokens, and what its KV really holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ipc.messages.sampling import NoiseKey
from ssd_pipe.engine.blocks import BlockTable
from ssd_pipe.sampling.processors import SequenceRules


@dataclass(slots=True, eq=False)
class Trunk:
    """Committed tokens of one sequence and the draft's KV for them.

    The KV is followed by content, not by protocol: ``written`` is what was fed at each position,
    and ``agreed`` how much of it still matches the committed tokens. Whatever the outcome of a
    round was, the next feed starts at the first position that differs.

    Attributes:
        tokens: committed tokens.
        table: blocks of the draft's KV.
        written: token fed at each position, proposals included.
        agreed: leading positions where ``written`` equals ``tokens``.
        rules: its processors with ``tokens`` taken in, None without any.
    """

    rid: int
    slot: int
    key: NoiseKey
    tokens: list[int]
    table: BlockTable = field(default_factory=BlockTable)
    written: list[int] = field(default_factory=list)
    agreed: int = 0
    rules: SequenceRules | None = None

    def commit(self, length: int, tokens: Sequence[int]) -> None:
        """Append committed tokens after the first ``length``. Raises ValueError on a gap."""
        if length != len(self.tokens):
            raise ValueError(f"draft has {len(self.tokens)} tokens, scheduler counts {length}")
        self.tokens.extend(tokens)
        if self.rules is not None:
            self.rules.commit(tokens)
        self._agree()

    def adopt(self, cached_tokens: int) -> None:
        """KV of the first ``cached_tokens`` positions was found in the prefix cache."""
        self.written = self.tokens[:cached_tokens]
        self.agreed = cached_tokens

    def feed_start(self) -> int:
        """First position to feed so that the last committed token gives logits."""
        return min(self.agreed, len(self.tokens) - 1)

    def fed(self, start: int, tokens: Sequence[int]) -> None:
        """Record that ``tokens`` were written from position ``start``. Raises ValueError if nothing
        was written just before it."""
        if start > len(self.written):
            raise ValueError(f"fed at {start}, but only {len(self.written)} positions are written")
        del self.written[start:]
        self.written.extend(tokens)
        self.agreed = min(self.agreed, start)
        self._agree()

    def _agree(self) -> None:
        end = min(len(self.tokens), len(self.written))
        while self.agreed < end and self.written[self.agreed] == self.tokens[self.agreed]:
            self.agreed += 1


Feed = tuple[Trunk, int, list[int], int]
"""(trunk, start, tokens to feed there, index of the first whose logits are wanted)."""


def mark_fed(feeds: Sequence[Feed]) -> None:
    """Record that a pass wrote these."""
    for trunk, start, tokens, _ in feeds:
        trunk.fed(start, tokens)
