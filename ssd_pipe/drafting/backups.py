"""Chains for rows that missed, made just in time: token by token, while the target waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from ipc.messages.draft import ChainReady, DraftRow
from ssd_pipe.drafting.passes import DraftPasses
from ssd_pipe.drafting.round_row import RoundRow
from ssd_pipe.drafting.trunks import Trunks

HandOver = Callable[[DraftRow, torch.Tensor | None], None]
"""Takes what a row's chain was drawn from, float32 [K, V], or None if it is lost or nothing was
drawn."""


def draft_backups(
    trunks: Trunks,
    passes: DraftPasses,
    number: int,
    rows: Sequence[RoundRow],
    answer: Callable[[ChainReady], None],
    hand_over: HandOver,
) -> Iterator[None]:
    """Draft ``plan.backup`` tokens into the chain of each row, which may hold the first already;
    yields after each pass.

    A row whose trunk cannot be fed in this round is answered with an empty chain.

    Args:
        number: of the round, for the answers.
        answer: gets each chain as soon as it is complete.
        hand_over: what it was drawn from, after it.
    """
    drawn: dict[int, list[torch.Tensor]] = {row.plan.slot: [] for row in rows}

    def unfinished(row: RoundRow) -> bool:
        plan, _, chain = row
        if len(chain) < plan.backup:
            return True
        answer(ChainReady(round=number, slot=plan.slot, tokens=chain))
        hand_over(plan, torch.stack(drawn[plan.slot]) if drawn[plan.slot] else None)
        return False

    drafting: list[RoundRow] = []
    for row in rows:
        if trunks.catch_up(row.trunk, row.plan.backup):
            drafting.append(row)
        else:
            row.chain.clear()
            hand_over(row.plan, None)
            answer(ChainReady(round=number, slot=row.plan.slot, tokens=[]))
    drafting = list(filter(unfinished, drafting))
    while drafting:
        feeds = []
        for row in drafting:
            _, trunk, chain = row
            if chain:
                feeds.append((trunk, len(trunk.tokens) + len(chain) - 1, chain[-1:], 0))
            else:
                feeds.append(row.feed())
        again = all(len(row.chain) + 1 < row.plan.backup for row in drafting)
        tokens, q = passes.next_tokens(feeds, [row.chain for row in drafting], again)
        for i, (plan, _, chain) in enumerate(drafting):
            chain.append(tokens[i])
            if q is not None:
                drawn[plan.slot].append(q[i])
        drafting = list(filter(unfinished, drafting))
        yield
