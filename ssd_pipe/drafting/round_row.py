"""One row of a round as the draft works on it."""

from __future__ import annotations

from typing import NamedTuple

from ipc.messages.draft import DraftRow
from ssd_pipe.drafting.trunk import Feed, Trunk


class RoundRow(NamedTuple):
    """What the plan says of a row, and its sequence.

    Attributes:
        plan: the row of the plan.
        trunk: its committed tokens.
        chain: the tokens that follow them and are verified now; a backup is appended as it is made.
    """

    plan: DraftRow
    trunk: Trunk
    chain: list[int]

    def feed(self) -> Feed:
        """All that the trunk's KV lacks, the chain included; logits from the last committed token
        on."""
        trunk, start = self.trunk, self.trunk.feed_start()
        return trunk, start, trunk.tokens[start:] + self.chain, len(trunk.tokens) - 1 - start
