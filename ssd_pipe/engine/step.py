"""One target step: which rows it has, what it asks of the target, and what each row gave."""

from __future__ import annotations

from dataclasses import dataclass

from ipc.messages.target import Logprobs, RowOutcome, SeqStart, StepPlan, StepRow
from ssd_pipe.engine.request import Request

FAILED = "failed"
"""``Emission.finish`` of a request that the target could not follow any further."""


@dataclass(slots=True)
class Row:
    """One request's part of a step: feed ``count`` committed tokens from ``start``.

    ``sample``: its last token's logits choose a token. ``decoding``: it may carry a chain.
    """

    request: Request
    start: int
    count: int
    sample: bool
    decoding: bool


@dataclass(slots=True)
class Step:
    """A planned step. ``begun`` took a slot in it; ``dropped`` are slots freed since the last."""

    number: int
    rows: list[Row]
    begun: list[Request]
    dropped: list[int]

    @property
    def sampled(self) -> list[Row]:
        return [row for row in self.rows if row.sample]

    @property
    def decoding(self) -> list[Row]:
        return [row for row in self.rows if row.decoding]

    def to_plan(self, handovers: dict[int, int], alone: bool = False) -> StepPlan:
        """The message for the target; ``handovers`` maps slots to hand-over numbers, ``alone`` is
        StepPlan's."""
        rows = []
        for row in self.rows:
            request = row.request
            tokens = request.tokens[row.start : row.start + row.count]
            chain = request.chain if row.decoding else []
            blocks = request.table.blocks[request.announced :]
            request.announced += len(blocks)
            rows.append(
                StepRow(
                    slot=request.slot,
                    start=row.start,
                    tokens=tokens + chain,
                    chain=len(chain),
                    sample=row.sample,
                    blocks=blocks,
                    handover=handovers.get(request.slot, 0),
                )
            )
        starts = {id(row.request): row.start for row in self.rows} if self.begun else {}
        begin = [
            SeqStart(
                rid=r.rid,
                slot=r.slot,
                key=r.key,
                tokens=r.tokens[: starts[id(r)]] if r.key.processors is not None else [],
                logprobs=r.logprobs,
            )
            for r in self.begun
        ]
        return StepPlan(self.number, rows, begin, self.dropped, alone=alone)


@dataclass(slots=True)
class Emission:
    """Tokens a step added to a request. ``outcome`` is the raw one, ``finish`` "" while it lives.

    ``prefix_hash`` is the request's before these tokens: with the outcome, the cache's key.
    ``finish`` is FAILED if the target could not go on; the outcome says why. ``logprobs``: one per
    token, where asked for. ``drafted``: length of the chain that was judged.
    """

    request: Request
    tokens: list[int]
    accepted: int
    outcome: RowOutcome
    prefix_hash: int
    finish: str
    drafted: int = 0

    @property
    def logprobs(self) -> list[Logprobs]:
        return self.outcome.logprobs[: len(self.tokens)]
