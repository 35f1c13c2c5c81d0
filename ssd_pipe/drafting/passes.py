"""The draft's forward passes over its trunks, and what is chosen from them.

CUDA graphs make the passes they take, the model itself all others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from ipc.messages.sampling import NoiseKey
from models.batch import ForwardBatch
from models.kv_cache import KVCache
from models.sequence_batch import BatchRow, build_batch
from models.transformer import Transformer
from ssd_pipe.config import SpeculationSection, fan_out_counts
from ssd_pipe.drafting.candidates import TOP_CANDIDATES
from ssd_pipe.drafting.round_row import RoundRow
from ssd_pipe.drafting.trunk import Feed, Trunk, mark_fed
from ssd_pipe.sampling import draft_choice
from ssd_pipe.sampling.filters import RowSampling
from ssd_pipe.sampling.processors import Place, chain_places, processed
from ssd_pipe.sampling.shared_noise import choose_from

if TYPE_CHECKING:
    from ssd_pipe.drafting.graphed import GraphedDraft

LARGE_VOCAB = 32768

Proposed = tuple[list[int], torch.Tensor | None]
"""The next token of each of N rows and, under the rejection rule, what it was drawn from: float32
[N, V], None if nothing was drawn."""


class DraftPasses:
    """The draft model with its KV.

    Args:
        block_size: tokens a KV block.
        graphs: make the passes they take; None without.

    Attributes:
        graphs: the same.
        device: where the model is.
    """

    def __init__(
        self,
        model: Transformer,
        kv: KVCache,
        block_size: int,
        spec: SpeculationSection,
        graphs: GraphedDraft | None = None,
    ) -> None:
        self._model = model
        self._kv = kv
        self._block_size = block_size
        self._spec = spec
        self.graphs = graphs
        self.device = model.backend.device
        self._vocab = chain_vocab(spec, model)
        counts = fan_out_counts(spec.fan_out, spec.k)
        self._cached_a_position = round(sum(counts) / len(counts))

    def choosing(self, trunks: Sequence[Trunk]) -> GraphedDraft | None:
        """The graphs, if they can choose the tokens of these rows too."""
        graphs = self.graphs
        return graphs if graphs is not None and graphs.chooses(trunks) else None

    # ------------------------------------------------------------ passes

    def feed(self, feeds: Sequence[Feed]) -> torch.Tensor:
        """Feed rows; hidden [L, H] of the tokens from each row's fourth entry on, in order."""
        rows = [
            BatchRow(trunk.table.blocks, start, tokens, first)
            for trunk, start, tokens, first in feeds
        ]
        hidden = self.extend(build_batch(rows, self._block_size, self.device))
        mark_fed(feeds)
        return hidden

    def extend(self, batch: ForwardBatch) -> torch.Tensor:
        """One pass of the model -> hidden [L, H]."""
        return self._model.forward(batch, self._kv)

    def next_tokens(
        self, feeds: Sequence[Feed], chains: Sequence[list[int]], again: bool = False
    ) -> Proposed:
        """Feed rows and choose the token after each; ``chains`` are theirs so far. ``again``: the
        next pass feeds the same rows what they get now."""
        graphs = self.choosing([trunk for trunk, *_ in feeds])
        if graphs is not None:
            tokens = graphs.chains.next_tokens(feeds, again)
            if tokens is not None:
                mark_fed(feeds)
                return tokens, None
        sampling = RowSampling.from_keys([trunk.key for trunk, *_ in feeds])
        positions = [start + len(tokens) for _, start, tokens, _ in feeds]
        offsets = [len(chain) for chain in chains]
        places = [
            Place(i, trunk.rules, chain)
            for i, (chain, (trunk, *_)) in enumerate(zip(chains, feeds, strict=True))
            if trunk.rules is not None
        ]
        logits = self._graph_logits(feeds)
        if logits is None:
            return self.propose(self.feed(feeds), sampling, positions, offsets, places)
        logits = logits[:, : self._vocab] if self._vocab else logits
        return self.propose_from(logits, sampling, positions, offsets, places)

    def candidates(
        self, rows: Sequence[RoundRow], meanwhile: Callable[[], None] = lambda: None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The glue pass: feed what each row's trunk lacks, and its chain of K tokens; ``meanwhile``
        is called if a GPU does it all.

        Returns:
            What ``draft_choice.fork_candidates`` gives for the K + 1 places of every row, in order.
        """
        feeds = [row.feed() for row in rows]
        graphs = self.choosing([row.trunk for row in rows])
        if graphs is not None:
            found = graphs.candidates(feeds, meanwhile)
            if found is not None:
                mark_fed(feeds)
                return found
        logits = self._graph_logits(feeds)
        if logits is None:
            logits = self._logits(self.feed(feeds))
        keys: list[NoiseKey] = []
        positions: list[int] = []
        offsets: list[int] = []
        own: list[int] = []
        places: list[Place] = []
        for _, trunk, chain in rows:
            if trunk.rules is not None:
                places += chain_places(len(keys), trunk.rules, chain)
            keys += [trunk.key] * (len(chain) + 1)
            positions += range(len(trunk.tokens), len(trunk.tokens) + len(chain) + 1)
            offsets += range(len(chain) + 1)
            own += [*chain, -1]
        if places:
            logits = processed(logits, places, overwrite=True)
        return draft_choice.fork_candidates(
            logits,
            RowSampling.from_keys(keys),
            positions,
            self._spec.rule,
            torch.tensor(own, device=logits.device),
            offsets,
            TOP_CANDIDATES,
            self._model.backend.sampling,
        )

    def _graph_logits(self, feeds: Sequence[Feed]) -> torch.Tensor | None:
        """``feed`` and ``_logits`` on a graph; None, with nothing fed, where there is none."""
        logits = None if self.graphs is None else self.graphs.chains.logits(feeds)
        if logits is not None:
            mark_fed(feeds)
        return logits

    def _logits(self, hidden: torch.Tensor, vocab: int = 0) -> torch.Tensor:
        logits = self._model.logits(hidden, vocab)
        if logits is None:
            raise RuntimeError("the draft does not run tensor-parallel")
        return logits

    # ------------------------------------------------------------ proposals

    def propose(
        self,
        hidden: torch.Tensor,
        sampling: RowSampling,
        positions: draft_choice.Ints,
        offsets: draft_choice.Ints,
        places: list[Place],
        mask_seconds: float | None = None,
    ) -> Proposed:
        """The next token of each row.

        Args:
            hidden: [N, H].
            sampling: settings of the rows.
            positions: index in the sequence of the token each row chooses.
            offsets: tokens of the row's chain before it.
            places: the rows that have processors.
            mask_seconds: what grammar masks may take, None = as long as they need.
        """
        if not places and (self._spec.rule == "shared_noise" or sampling.greedy.all()):
            chosen = choose_from(self._model, hidden, sampling, positions, self._vocab)
            return chosen.tolist(), None
        logits = self._logits(hidden, self._vocab)
        return self.propose_from(logits, sampling, positions, offsets, places, mask_seconds)

    def propose_from(
        self,
        logits: torch.Tensor,
        sampling: RowSampling,
        positions: draft_choice.Ints,
        offsets: draft_choice.Ints,
        places: list[Place],
        mask_seconds: float | None = None,
    ) -> Proposed:
        """``propose`` from logits float32 [N, V], which it may change."""
        if places:
            logits = processed(logits, places, mask_seconds, True)
        tokens, q = draft_choice.propose(
            logits,
            sampling,
            positions,
            self._spec.rule,
            offsets,
            self._spec.saguaro_c,
            self._cached_a_position,
            self._model.backend.sampling,
        )
        return tokens.tolist(), q


def chain_vocab(spec: SpeculationSection, model: Transformer) -> int:
    """Leading token ids that branches and backups choose from, 0 = all."""
    wanted, size = spec.draft_vocab, model.config.vocab_size
    if not wanted and model.backend.device.type == "cpu" and size > LARGE_VOCAB:
        return size // 2
    return wanted if wanted < size else 0
