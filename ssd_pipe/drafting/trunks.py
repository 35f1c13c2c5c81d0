"""The sequences the draft knows: their trunks by slot, their KV blocks, and what lags behind."""

from __future__ import annotations

from ipc.messages.draft import DraftRow, DraftStart
from ssd_pipe.drafting.trunk import Feed, Trunk
from ssd_pipe.engine.blocks import BlockManager, NoFreeBlocks
from ssd_pipe.sampling.grammar import Grammars
from ssd_pipe.sampling.processors import SequenceRules

PREFILL_CHUNK = 256
"""Most tokens of prompts and other lag that one pass feeds."""


class Trunks:
    """Owns the trunks and the blocks that hold their KV.

    Args:
        blocks: the draft's KV without the branches' scratch region.
        grammars: follow response formats; None where no request can have one.
        k: longest chain.
    """

    def __init__(self, blocks: BlockManager, grammars: Grammars | None, k: int) -> None:
        self._blocks = blocks
        self._grammars = grammars
        self._k = k
        self._trunks: dict[int, Trunk] = {}
        self._room = 0  # lag that the present round may still take in

    def __getitem__(self, slot: int) -> Trunk:
        return self._trunks[slot]

    def __contains__(self, slot: int) -> bool:
        return slot in self._trunks

    @property
    def slots(self) -> list[int]:
        """Slots in use."""
        return list(self._trunks)

    # ------------------------------------------------------------ sequences

    def begin(self, start: DraftStart) -> None:
        """Take in a sequence; what the prefix cache has of it need not be fed."""
        trunk = Trunk(start.rid, start.slot, start.key, list(start.tokens))
        self._trunks[trunk.slot] = trunk
        if trunk.key.processors is not None:
            trunk.rules = SequenceRules(trunk.key.processors, self._grammars)
            trunk.rules.commit(trunk.tokens)
        cached = self._blocks.match_prefix(trunk.tokens)
        covered = len(cached) * self._blocks.block_size
        self._blocks.allocate(trunk.table, trunk.tokens, cached, num_tokens=covered)
        trunk.adopt(covered)

    def drop(self, slot: int) -> bool:
        """Forget a slot's sequence; False if there is none."""
        trunk = self._trunks.pop(slot, None)
        if trunk is None:
            return False
        self._blocks.release(trunk.table)
        return True

    def commit(self, row: DraftRow) -> None:
        """Append the tokens a round has committed. Raises ValueError on a gap."""
        trunk = self._trunks[row.slot]
        trunk.commit(row.length, row.tokens)
        self.register(trunk)

    def register(self, trunk: Trunk) -> None:
        """Let the prefix cache know of the trunk's full blocks whose KV is right."""
        agreed = min(trunk.agreed, len(trunk.tokens) - 1)
        self._blocks.commit(trunk.table, trunk.tokens, agreed)

    # ------------------------------------------------------------ what lags behind

    def begin_round(self) -> None:
        """All rows of a round together may lag a chunk behind what rounds leave anyway."""
        self._room = PREFILL_CHUNK

    def catch_up(self, trunk: Trunk, chain: int) -> bool:
        """Blocks for a trunk and a chain of so many tokens, and not much left to feed; False if it
        cannot be in this round."""
        lag = max(0, len(trunk.tokens) - trunk.agreed - self._k - 2)
        if lag > self._room:
            return False
        self._room -= lag
        return self.reserve(trunk, len(trunk.tokens) + chain)

    def lagging_chunk(self) -> Feed | None:
        """The next chunk of some trunk that lags behind, with blocks for it; None if none does."""
        for trunk in self._trunks.values():
            lag = len(trunk.tokens) - 1 - trunk.agreed
            if lag > 0:
                chunk = trunk.tokens[trunk.agreed : trunk.agreed + min(lag, PREFILL_CHUNK)]
                if self.reserve(trunk, trunk.agreed + len(chunk)):
                    return trunk, trunk.agreed, chunk, len(chunk)
        return None

    def reserve(self, trunk: Trunk, num_tokens: int) -> bool:
        """Blocks for so many tokens of a trunk; False if there are not enough."""
        try:
            self._blocks.ensure(trunk.table, num_tokens)
        except NoFreeBlocks:
            return False
        return True
