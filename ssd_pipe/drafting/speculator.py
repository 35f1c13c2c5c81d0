"""The draft's work in one round: backup chains, glue pass, fork, branches.

The order of a round, for all of its rows together:

1. *backup*: rows whose outcome was a miss get a chain just in time, token by token;
2. *glue*: one pass over what each trunk lacks, the chain under verification included;
3. *fork*: the outcomes worth speculating on, chosen from the K + 1 rows of the glue pass;
4. *branches*: K passes, each extends every branch of every row by one token, published at once.

``round`` is a generator that yields between passes, so that its caller can drop the rest of a round
when the outcome has already come.

With several workers each does all of this, but extends and publishes only its share of the branches
(``engine.partition``). Backups are worker 0's: the others get the plan with those chains filled in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from ipc.messages.draft import ChainReady, DraftPlan, DraftRow
from ipc.messages.sampling import NoiseKey
from models.kv_cache import KVCache
from models.sequence_batch import BatchRow, build_batch
from models.transformer import Transformer
from ssd_pipe.config import SpeculationSection, branch_budget, fan_out_counts
from ssd_pipe.drafting.candidates import (
    TOP_CANDIDATES,
    AcceptanceCurve,
    Calibration,
    ChainScores,
)
from ssd_pipe.drafting.tree import BranchBatches, Branches, Tree
from ssd_pipe.drafting.trunk import Feed, Trunk
from ssd_pipe.engine import fanout
from ssd_pipe.engine.blocks import BlockManager, NoFreeBlocks
from ssd_pipe.engine.partition import Share, part_entries
from ssd_pipe.engine.speculation_cache import SpeculationCache
from ssd_pipe.sampling import draft_choice
from ssd_pipe.sampling.filters import RowSampling
from ssd_pipe.sampling.grammar import Grammars
from ssd_pipe.sampling.noise import ACCEPT, round_stream, row_keys, uniforms
from ssd_pipe.sampling.processors import Place, SequenceRules, chain_places, processed
from ssd_pipe.sampling.shared_noise import choose_from

if TYPE_CHECKING:
    from ssd_pipe.drafting.graphed import Forked, GraphedDraft, PendingScores

PREFILL_CHUNK = 256
LARGE_VOCAB = 32768
GREEDY_TAU, SAMPLED_TAU = 0.7, 0.85
MASK_SECONDS = 0.002
"""What a pass over branches may spend on grammar masks, likeliest branches first; a complex grammar
takes .5 ms a mask. Further tokens are proposed without one."""
MISS_EXPONENT = 0.7
"""Power-law exponent r of the miss rate against fan-out (Theorem 12)."""


Propose = Callable[..., tuple[list[int], torch.Tensor | None]]
"""``Speculator._propose`` or ``_propose_from``."""
Choice = tuple[int, int, float, list[int]]
"""How the GPU is to choose a row's branches; see ``models.cuda.fork.ForkRow``."""


class Recipient(Protocol):
    """Where draft distributions go under the rejection rule; see ``ipc.handover``."""

    def put(self, slot: int, number: int, rows: np.ndarray | None) -> None:
        """Hand over float32 [n, V], or None if they are lost."""


class Speculator:
    """The draft model, its KV and trunks, and the writing side of the speculation cache.

    ``scratch_start`` is the first flat KV slot of the scratch region, which holds
    max_num_seqs * budget * k tokens of this worker's branches; ``blocks`` manages the KV before it.

    Attributes:
        budget: most branches of a row, all workers together.
    """

    def __init__(
        self,
        model: Transformer,
        kv: KVCache,
        blocks: BlockManager,
        scratch_start: int,
        cache: SpeculationCache,
        spec: SpeculationSection,
        handover: Recipient | None,
        grammars: Grammars | None = None,
        graphs: GraphedDraft | None = None,
        share: Share = Share(),
    ) -> None:
        """``graphs`` make the passes they take; ``cache`` is the part of worker ``share``."""
        self._model = model
        self._graphs = graphs
        self._share = share
        self._kv = kv
        self._blocks = blocks
        self._scratch_start = scratch_start
        self._cache = cache
        self._spec = spec
        self._handover = handover
        self._grammars = grammars
        self._trunks: dict[int, Trunk] = {}
        self._tree = Tree()
        self._asked: dict[int, ChainScores | PendingScores] = {}
        self._lessons: list[tuple[bool, ChainScores | PendingScores, int, int]] = []
        self._calibration = {
            True: Calibration(GREEDY_TAU),
            False: Calibration(SAMPLED_TAU),
        }
        self._curve = AcceptanceCurve()
        hit = fan_out_counts(spec.fan_out, spec.k)
        miss = hit if spec.fan_out_miss is None else fan_out_counts(spec.fan_out_miss, spec.k)
        self._counts = {False: hit, True: miss}
        self.budget = branch_budget(spec)
        self._depth, self._most, self._room = spec.k, self.budget, 0  # of the present round
        self._vocab = chain_vocab(spec, model)
        self._cached_a_position = round(sum(hit) / len(hit))

    # ------------------------------------------------------------ state

    def apply(self, plan: DraftPlan) -> None:
        """Take in what a plan says of the sequences, whether or not its round will run."""
        for slot in list(self._trunks) if plan.fresh else plan.drop:
            trunk = self._trunks.pop(slot, None)
            if trunk is not None:
                self._blocks.release(trunk.table)
                self._cache.clear(slot)
                self._asked.pop(slot, None)
        for start in plan.begin:
            self._begin(Trunk(start.rid, start.slot, start.key, list(start.tokens)))
        for row in plan.rows:
            trunk = self._trunks[row.slot]
            self._learn(trunk, row.tokens)
            trunk.commit(row.length, row.tokens)
            self._blocks.commit(trunk.table, trunk.tokens, min(trunk.agreed, len(trunk.tokens) - 1))
            if row.handover and not row.backup and self._share.makes(row.handover):
                self._hand_over_branch(row)

    def _begin(self, trunk: Trunk) -> None:
        self._trunks[trunk.slot] = trunk
        if trunk.key.processors is not None:
            trunk.rules = SequenceRules(trunk.key.processors, self._grammars)
            trunk.rules.commit(trunk.tokens)
        cached = self._blocks.match_prefix(trunk.tokens)
        covered = len(cached) * self._blocks.block_size
        self._blocks.allocate(trunk.table, trunk.tokens, cached, num_tokens=covered)
        trunk.adopt(covered)

    def _learn(self, trunk: Trunk, tokens: list[int]) -> None:
        """Note the outcome that ``tokens`` tell of, for when there is time to learn from it."""
        scores = self._asked.pop(trunk.slot, None)
        if scores is None or not tokens:
            return
        k = 0
        while k < len(tokens) - 1 and k < len(scores.chain) and tokens[k] == scores.chain[k]:
            k += 1
        self._lessons.append((trunk.key.temperature == 0, scores, k, tokens[k]))

    def _study(self) -> None:
        """Calibrate on the outcomes told of since the last time."""
        for greedy, scores, k, token in self._lessons:
            self._calibration[greedy].observe(scores.likelihoods(k, token))
            if scores.tests is not None:
                self._curve.observe(scores.tests, k)
        self._lessons.clear()

    # ------------------------------------------------------------ a round

    def round(
        self,
        plan: DraftPlan,
        answer: Callable[[ChainReady], None],
        skip: Callable[[int], None] = lambda slot: None,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> Iterator[str]:
        """Run a plan's round; yields the stage just done: "backup", "glue", "step".

        ``skip`` is told of slots that get no branches. Under a lease the wait for a pass over the
        branches ends when ``interrupted`` says so.
        """
        self._depth = min(plan.k or self._spec.k, self._spec.k)
        self._most = min(plan.branches or self.budget, self.budget)
        self._room = PREFILL_CHUNK
        chains = {row.slot: list(row.chain) for row in plan.rows}
        backups = [row for row in plan.rows if row.backup]
        if backups:
            for _ in self._backup(plan.round, backups, chains, answer):
                yield "backup"
        forks = [row for row in plan.rows if row.fork]
        ready = []
        for row in forks:
            if self._catch_up(self._trunks[row.slot], chains[row.slot]):
                ready.append(row)
            else:
                skip(row.slot)
        if not ready:
            return
        forked = self._fork_leased(ready, chains, plan.number) if plan.number else None
        if forked is not None and self._graphs is not None:
            stage = "glue"
            for _ in self._graphs.grow_forked(forked, self._study, interrupted):
                yield stage
                stage = "step"
            return
        self._fork(ready, chains, plan.number)
        if not self._tree.size:
            for row in ready:
                skip(row.slot)
        yield "glue"
        for _ in self._grow(interrupted if plan.number else lambda: False):
            yield "step"

    def prefill(self) -> bool:
        """Feed one chunk of some trunk that lags behind; False if none does."""
        for trunk in self._trunks.values():
            lag = len(trunk.tokens) - 1 - trunk.agreed
            if lag > 0:
                chunk = trunk.tokens[trunk.agreed : trunk.agreed + min(lag, PREFILL_CHUNK)]
                if self._reserve(trunk, trunk.agreed + len(chunk)):
                    self._feed([(trunk, trunk.agreed, chunk, len(chunk))])
                    self._blocks.commit(trunk.table, trunk.tokens, trunk.agreed)
                    return True
        return False

    def request_ids(self, plan: DraftPlan) -> list[int]:
        """Requests of a plan's rows, for logs."""
        return [self._trunks[row.slot].rid for row in plan.rows if row.slot in self._trunks]

    def tokens_of(self, slot: int) -> list[int]:
        """Committed tokens of a slot."""
        return self._trunks[slot].tokens

    @property
    def branches(self) -> int:
        """Branches of the latest round."""
        return self._tree.size

    # ------------------------------------------------------------ stages

    def _backup(
        self,
        number: int,
        rows: list[DraftRow],
        chains: dict[int, list[int]],
        answer: Callable[[ChainReady], None],
    ) -> Iterator[None]:
        able = []
        for row in rows:
            trunk = self._trunks[row.slot]
            if self._catch_up(trunk, [0] * row.backup):
                able.append(row)
            else:
                self._hand_over(row, None)
                answer(ChainReady(round=number, slot=row.slot, tokens=[]))
        qs: dict[int, list[torch.Tensor]] = {row.slot: [] for row in able}
        drafting = able
        while drafting:
            feeds = []
            for row in drafting:
                trunk, chain = self._trunks[row.slot], chains[row.slot]
                if chain:
                    feeds.append((trunk, len(trunk.tokens) + len(chain) - 1, chain[-1:], 0))
                else:
                    start = trunk.feed_start()
                    tokens = trunk.tokens[start:]
                    feeds.append((trunk, start, tokens, len(tokens) - 1))
            chosen, q = self._next_tokens(feeds, [chains[row.slot] for row in drafting])
            still = []
            for i, row in enumerate(drafting):
                chains[row.slot].append(chosen[i])
                if q is not None:
                    qs[row.slot].append(q[i])
                if len(chains[row.slot]) < row.backup:
                    still.append(row)
                else:
                    answer(ChainReady(round=number, slot=row.slot, tokens=chains[row.slot]))
                    if row.handover:
                        self._hand_over(row, torch.stack(qs[row.slot]) if qs[row.slot] else None)
            drafting = still
            yield

    def _next_tokens(
        self, feeds: list[Feed], chains: list[list[int]]
    ) -> tuple[list[int], torch.Tensor | None]:
        """Feed rows whose chains are these so far; see ``_propose``."""
        graphs = self._graphs
        if graphs is not None and graphs.chooses([trunk for trunk, *_ in feeds]):
            tokens = graphs.next_tokens(feeds)
            if tokens is not None:
                self._fed(feeds)
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
            return self._propose(self._feed(feeds), sampling, positions, offsets, places)
        logits = logits[:, : self._vocab] if self._vocab else logits
        return self._propose_from(logits, sampling, positions, offsets, places)

    def _fork(self, rows: list[DraftRow], chains: dict[int, list[int]], number: int) -> None:
        """Glue pass and choice of branches; publishes the outcomes with no tokens yet.

        Those for leased round ``number`` are published by the GPU that extends them.
        """
        feeds: list[Feed] = []
        keys: list[NoiseKey] = []
        positions: list[int] = []
        offsets: list[int] = []
        excluded: list[int] = []
        places: list[Place] = []
        for row in rows:
            trunk, chain = self._trunks[row.slot], chains[row.slot]
            start = trunk.feed_start()
            tokens = trunk.tokens[start:] + chain
            first = len(trunk.tokens) - 1 - start
            feeds.append((trunk, start, tokens, first))
            if trunk.rules is not None:
                places += chain_places(len(keys), trunk.rules, chain)
            keys += [trunk.key] * (len(chain) + 1)
            positions += range(len(trunk.tokens), len(trunk.tokens) + len(chain) + 1)
            offsets += range(len(chain) + 1)
            excluded += [*chain, -1]
        found = None
        if self._graphs is not None and self._graphs.chooses([trunk for trunk, *_ in feeds]):
            found = self._graphs.candidates(feeds)
        if found is not None:
            self._fed(feeds)
        else:
            logits = self._graph_logits(feeds)
            if logits is None:
                logits = self._logits(self._feed(feeds))
            if places:
                logits = processed(logits, places, overwrite=True)
            found = draft_choice.fork_candidates(
                logits,
                RowSampling.from_keys(keys),
                positions,
                self._spec.rule,
                torch.tensor(excluded, device=logits.device),
                offsets,
                TOP_CANDIDATES,
                self._model.backend.sampling,
            )
        tokens_np, scores_np, chain_scores = found
        tree = Tree(number=number)
        taper = self._taper
        first_row = 0
        for row in rows:
            chain = chains[row.slot]
            span = slice(first_row, first_row + len(chain) + 1)
            first_row += len(chain) + 1
            candidates = ChainScores(
                tokens_np[span],
                scores_np[span],
                chain,
                chain_scores[span][: len(chain)],
                self._tests(row, len(chain)),
            )
            ranked = self._select(self._trunks[row.slot], row, candidates)
            self._asked[row.slot] = candidates
            outcomes = self._share.of(row.slot, ranked)
            branches = Branches(row, self._trunks[row.slot], outcomes, len(ranked), self._share)
            tree.rows[row.slot] = branches
            entries = [(row.prefix_hash, k, t) for k, t in outcomes]
            partly = taper < 1 or self._depth < self._spec.k
            goals = branches.goals(self._depth, taper) if partly else None
            if not number:
                self._cache.begin_round(row.slot, entries, goals)
        self._tree = tree

    def _tests(self, row: DraftRow, length: int) -> np.ndarray | None:
        """Uniforms float64 [length] that will test a chain drawn from the draft; None without."""
        if not row.handover or not length:
            return None
        trunk = self._trunks[row.slot]
        offsets = np.arange(length)
        streams = round_stream(ACCEPT, offsets)
        return uniforms(row_keys([trunk.key.seed], len(trunk.tokens) + offsets, streams))

    def _fork_leased(
        self, rows: list[DraftRow], chains: dict[int, list[int]], number: int
    ) -> Forked | None:
        """Glue pass, fork and the tree's first step without the host between; None if a row needs
        more than that."""
        trunks = [self._trunks[row.slot] for row in rows]
        graphs = self._graphs
        if graphs is None or not graphs.chooses(trunks) or self._spec.allocation == "geometric":
            return None
        feeds: list[Feed] = []
        choices: list[Choice] = []
        for row, trunk in zip(rows, trunks, strict=True):
            chain, start = chains[row.slot], trunk.feed_start()
            first = len(trunk.tokens) - 1 - start
            feeds.append((trunk, start, trunk.tokens[start:] + chain, first))
            counts, length = self._counts[row.after_miss], len(chain)
            limits = [TOP_CANDIDATES] * (length + 1)
            if self._spec.allocation != "confidence":
                whole = length == self._spec.k
                limits = counts if whole else fanout.uniform(sum(counts), length)
            tau = self._calibration[trunk.key.temperature == 0].tau
            choices.append((first, sum(counts), tau, limits))
        slots = [row.slot for row in rows]
        forked = graphs.fork(feeds, slots, [row.prefix_hash for row in rows], number, choices)
        if forked is None:
            return None
        self._fed(feeds)
        for i, row in enumerate(rows):
            chain = chains[row.slot]
            self._asked[row.slot] = forked.pending(i, choices[i][0], chain)
        self._tree = Tree(number=number, forked=sum(budget for _, budget, _, _ in choices))
        return forked

    def _select(self, trunk: Trunk, row: DraftRow, scores: ChainScores) -> list[tuple[int, int]]:
        counts = self._counts[row.after_miss]
        tau = self._calibration[trunk.key.temperature == 0].tau
        accept, weights = scores.weights(tau, self._curve)
        length = len(scores.chain)
        exclude = np.append(np.array(scores.chain, np.int64), -1)[:, None]
        tokens = np.where(scores.tokens == exclude, -1, scores.tokens)
        budget = min(sum(counts), self._most)
        per_k: list[int] | None = None
        if self._spec.allocation != "confidence":
            per_k = counts[: length + 1]
            if self._spec.allocation == "geometric":
                per_k = fanout.geometric(
                    budget, length, float(accept.mean()) if length else 0.5, MISS_EXPONENT
                )
            elif length < self._spec.k or budget < sum(counts):
                per_k = fanout.uniform(budget, length)
        return fanout.select_branches(tokens, weights, accept, per_k, budget)

    def _grow(self, interrupted: Callable[[], bool]) -> Iterator[None]:
        """Extend the branches, one token a pass, publishing each depth."""
        tree, spec = self._tree, self._spec
        if not tree.size:
            return
        graphs = self._graphs
        if graphs is not None and graphs.chooses([b.trunk for b in tree.rows.values()]):
            for depth, grown in enumerate(graphs.grow(tree, self._study, interrupted), 1):
                for slot, tokens in grown.items():
                    if len(tokens) and not tree.number:
                        self._cache.publish_depth(slot, depth, tokens)
                yield
                if depth == self._depth:
                    return
            return
        self._study()
        device = self._model.backend.device
        own = part_entries(self.budget, self._share.workers)
        branches = BranchBatches(tree, self._scratch_start, own, spec.k, device)
        chains = {slot: self._asked[slot].chain for slot in tree.rows}
        suffixes = tree.suffixes(chains)

        def choose(step: int, scores: torch.Tensor, propose: Propose) -> list[int]:
            """The tokens of pass ``step``, from hidden states or logits; publishes them."""
            alive, spans = branches.alive(step, self._taper)
            chosen, q = propose(
                scores,
                branches.sampling(alive),
                branches.chosen_positions(step, alive),
                [step] * len(alive),
                suffixes.places(alive),
                MASK_SECONDS,
            )
            suffixes.extend(alive, chosen)
            branches.tokens[alive] = chosen
            tree.q.append(q)
            tree.spans.append(spans)
            for slot, span in spans.items():
                if span.start < span.stop:
                    self._cache.publish_depth(slot, step + 1, chosen[span])
            return chosen

        if graphs is not None:
            grown_by_rows = graphs.grow_chosen(tree, partial(choose, propose=self._propose_from))
            for depth, _ in enumerate(grown_by_rows, 1):
                yield
                if depth == self._depth:
                    return
            return
        for step in range(self._depth):
            alive, _ = branches.alive(step, self._taper)
            if not len(alive):
                return
            hidden = self._model.forward(branches.batch(step, alive), self._kv)
            choose(step, hidden, self._propose)
            yield

    @property
    def _taper(self) -> float:
        """Share of the branches that go on to the next depth; graphs extend all of them."""
        return self._spec.taper if self._graphs is None else 1.0

    # ------------------------------------------------------------ passes

    def _catch_up(self, trunk: Trunk, chain: list[int]) -> bool:
        """Blocks for trunk and chain, and not much left to feed; False if it cannot be now.

        All rows of a round together may lag a chunk behind what rounds leave anyway.
        """
        lag = max(0, len(trunk.tokens) - trunk.agreed - self._spec.k - 2)
        if lag > self._room:
            return False
        self._room -= lag
        return self._reserve(trunk, len(trunk.tokens) + len(chain))

    def _reserve(self, trunk: Trunk, num_tokens: int) -> bool:
        try:
            self._blocks.ensure(trunk.table, num_tokens)
        except NoFreeBlocks:
            return False
        return True

    def _feed(self, feeds: list[Feed]) -> torch.Tensor:
        """Feed (trunk, start, tokens, first token with logits) rows -> hidden [L, H]."""
        rows = [
            BatchRow(trunk.table.blocks, start, toks, first) for trunk, start, toks, first in feeds
        ]
        batch = build_batch(rows, self._blocks.block_size, self._model.backend.device)
        hidden = self._model.forward(batch, self._kv)
        self._fed(feeds)
        return hidden

    def _graph_logits(self, feeds: list[Feed]) -> torch.Tensor | None:
        """``_feed`` and ``_logits`` on a graph; None, with nothing fed, where there is none."""
        logits = None if self._graphs is None else self._graphs.logits(feeds)
        if logits is not None:
            self._fed(feeds)
        return logits

    @staticmethod
    def _fed(feeds: list[Feed]) -> None:
        for trunk, start, toks, _ in feeds:
            trunk.fed(start, toks)

    def _logits(self, hidden: torch.Tensor, vocab: int = 0) -> torch.Tensor:
        logits = self._model.logits(hidden, vocab)
        if logits is None:
            raise RuntimeError("the draft does not run tensor-parallel")
        return logits

    def _propose(
        self,
        hidden: torch.Tensor,
        sampling: RowSampling,
        positions: draft_choice.Ints,
        offsets: draft_choice.Ints,
        places: list[Place],
        mask_seconds: float | None = None,
    ) -> tuple[list[int], torch.Tensor | None]:
        """Next token of each row and, under the rejection rule, what it was drawn from.

        ``offsets`` count the tokens of the row's chain before it; ``places`` are the rows that have
        processors.
        """
        if not places and (self._spec.rule == "shared_noise" or sampling.greedy.all()):
            chosen = choose_from(self._model, hidden, sampling, positions, self._vocab)
            return chosen.tolist(), None
        logits = self._logits(hidden, self._vocab)
        return self._propose_from(logits, sampling, positions, offsets, places, mask_seconds)

    def _propose_from(
        self,
        logits: torch.Tensor,
        sampling: RowSampling,
        positions: draft_choice.Ints,
        offsets: draft_choice.Ints,
        places: list[Place],
        mask_seconds: float | None = None,
    ) -> tuple[list[int], torch.Tensor | None]:
        """``_propose`` from logits float32 [N, V], which it may change."""
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

    # ------------------------------------------------------------ hand-over

    def _hand_over_branch(self, row: DraftRow) -> None:
        """Distributions of a chain that came out of the cache."""
        place = self._share.place(row.entry)
        self._hand_over(row, self._tree.distributions(row.slot, place, len(row.chain)))

    def _hand_over(self, row: DraftRow, q: torch.Tensor | None) -> None:
        if row.handover and self._handover is not None:
            rows = None if q is None else q.float().cpu().numpy()
            self._handover.put(row.slot, row.handover, rows)


def chain_vocab(spec: SpeculationSection, model: Transformer) -> int:
    """Leading token ids that branches and backups choose from, 0 = all."""
    wanted, size = spec.draft_vocab, model.config.vocab_size
    if not wanted and model.backend.device.type == "cpu" and size > LARGE_VOCAB:
        return size // 2
    return wanted if wanted < size else 0
