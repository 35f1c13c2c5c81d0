"""The choice of branches on the GPU, between the glue pass and the tree that extends them.

What ``drafting.candidates`` and ``engine.fanout`` do on the host, in float32: from noised scores
after each prefix of the chain, the chance of outcome (k, t*) is that of reaching k times that of t*
there, under a softmax with the calibrated temperature; the most likely ones become the tree's
first tokens. The tree can then be launched right behind the glue pass.
"""
# mypy: allow-untyped-defs

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from models.cuda.candidate_box import CandidateBox
from models.cuda.candidates import pack, unpack
from models.cuda.graphs import StepGraph
from models.cuda.noise import mix_key
from models.cuda.overlap import after_previous, overlap
from models.cuda.rounds.follow import WANTED_WORDS, Fed, Follower, Mode
from models.cuda.staging import Field, Staging
from models.cuda.tree import TreeGraph

_WARP_LANES = 1024  # elements of a tile that one warp takes


@triton.jit
def _fork_kernel(
    top_scores,
    top_tokens,
    next_scores,
    fed,
    starts,
    counts,
    seeds,
    firsts,
    budgets,
    temperatures,
    limits,
    homes,
    tokens,
    positions,
    slots,
    live,
    context_lens,
    keys,
    outcomes,
    branches,
    scratch_start,
    WIDTH: tl.constexpr,
    WIDTH_P: tl.constexpr,
    N: tl.constexpr,
    BRANCHES: tl.constexpr,
    BRANCHES_P: tl.constexpr,
    STEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    budget = tl.load(budgets + row)
    if budget > 0:
        first = tl.load(firsts + row)
        n = tl.load(counts + row) - 1 - first
        tau = tl.load(temperatures + row)
        i = tl.arange(0, WIDTH_P)
        at = row * WIDTH + first + i
        c = tl.arange(0, N)
        inside = i <= n
        cells = at[:, None] * N + c[None, :]
        score = tl.load(top_scores + cells, mask=inside[:, None], other=0.0)
        token = tl.load(top_tokens + cells, mask=inside[:, None], other=-1)
        best = tl.load(top_scores + at * N, mask=inside, other=0.0)
        following = tl.load(fed + at + 1, mask=i < n, other=-1)
        own = tl.load(next_scores + at, mask=i < n, other=0.0)
        weight = tl.exp((score - best[:, None]) / tau)
        weight = tl.where(inside[:, None], weight, 0.0)
        said = (token == following[:, None]) & (i < n)[:, None]
        known = tl.sum(said.to(tl.int32), axis=1) > 0
        own = tl.where(i < n, tl.exp((own - best) / tau), 0.0)
        total = tl.sum(weight, axis=1) + tl.where(known, 0.0, own)
        total = tl.where(inside, total, 1.0)
        accept = tl.where(i < n, tl.log(tl.maximum(own / total, 1e-30)), 0.0)
        reach = tl.exp(tl.cumsum(accept, axis=0) - accept)
        open_to = inside[:, None] & (said == 0)
        rank = tl.cumsum(open_to.to(tl.int32), axis=1) - 1
        limit = tl.load(limits + row * WIDTH + i, mask=inside, other=0)
        open_to = open_to & (rank < limit[:, None])
        chance = tl.where(open_to, reach[:, None] * weight / total[:, None], -1.0)
        lane = tl.arange(0, WIDTH_P * N)
        best_first = tl.topk(pack(tl.reshape(chance, (WIDTH_P * N,)), lane), BRANCHES_P)
        peak, where = unpack(best_first)
        e = tl.arange(0, BRANCHES_P)
        exists = e < BRANCHES
        alive = (e < budget) & (peak >= 0.0)
        k = (where // N).to(tl.int64)
        cell = (row * WIDTH + first + k) * N + where % N
        chosen = tl.load(top_tokens + cell, mask=alive & exists, other=0)
        to = row * BRANCHES + e
        position = tl.load(starts + row) + first + 1 + k
        home = tl.load(homes + row)
        tl.store(tokens + to, chosen, mask=exists)
        tl.store(positions + to, position, mask=exists)
        tl.store(slots + to, scratch_start + (home * BRANCHES + e) * STEPS, mask=exists)
        tl.store(live + to, alive.to(tl.int32), mask=exists)
        tl.store(context_lens + to, tl.where(alive, position, 0).to(tl.int32), mask=exists)
        tl.store(outcomes + to, tl.where(alive, (k << 32) | chosen, -1), mask=exists)
        base = mix_key(tl.full((), 0, tl.uint64), tl.load(seeds + row))
        for step in range(STEPS):
            key = mix_key(mix_key(base, position + 1 + step), tl.full((), 0, tl.int64))
            tl.store(keys + step * branches + to, key.to(tl.int64), mask=exists)


@dataclass(slots=True)
class ForkRow:
    """What the choice of one row's branches needs besides the glue pass.

    Attributes:
        first: index among the tokens fed of the one before the chain.
        budget: most branches.
        temperature: of the softmax over scores.
        limits: most branches at each accepted length 0..K.
    """

    first: int
    budget: int
    temperature: float
    limits: Sequence[int]


@dataclass(slots=True)
class ForkOne:
    """The input of a glue pass of one row, and the choice of its branches.

    Attributes:
        mode: where the input comes from; with number, length and prefix_hash as it says.
        place: the row's among those of the records.
        budget, temperature: as in ForkRow; the row's first place is the first token fed.
        limits: a ForkRow's, for a chain of 0, 1, ..., K tokens.
        tokens: those to feed, if they are given.
    """

    mode: Mode
    number: int
    length: int
    prefix_hash: int
    place: int
    budget: int
    temperature: float
    limits: Sequence[Sequence[int]]
    tokens: Sequence[int] = ()


class ForkHooks:
    """``StepHooks`` of the glue graphs: the tail fills in the tree's first tokens, and shows what
    they were chosen from; the head of those of one row makes the input, if armed for that.

    Every arming has a number, the next one from 1 on.

    Args:
        tree_of: the tree graph for a glue graph of as many rows and blocks; it must exist.
        scratch_start: see ``GraphedDraft``.
        follower: makes the inputs; None where they are always loaded.
    """

    def __init__(
        self,
        max_rows: int,
        width: int,
        device: torch.device,
        scratch_start: int,
        tree_of: Callable[[int, int], TreeGraph],
        follower: Follower | None = None,
    ) -> None:
        self._tree_of, self._scratch_start = tree_of, scratch_start
        self._follower = follower
        self._armed = False
        self._serial = 0
        self._boxes: dict[tuple[int, int], CandidateBox] = {}
        self._staging = Staging(
            [
                Field("firsts", (max_rows,), torch.int64),
                Field("budgets", (max_rows,), torch.int32),
                Field("temperatures", (max_rows,), torch.float32),
                Field("limits", (max_rows, width), torch.int32),
                Field("serial", (1,), torch.int64),
                Field("wanted", (WANTED_WORDS,), torch.int64),
                Field("given", (width,), torch.int64),
                Field("options", (width, width), torch.int32),
            ],
            device,
        )

    def arm(self, rows: Sequence[ForkRow]) -> int:
        """Queue what the next launch of a glue graph needs to choose branches; its number."""
        host = self._cleared()
        for i, row in enumerate(rows):
            host["firsts"][i] = row.first
            host["budgets"][i] = row.budget
            host["temperatures"][i] = row.temperature
            host["limits"][i, : len(row.limits)] = row.limits
        return self._arm(host)

    def arm_one(self, row: ForkOne) -> int:
        """Queue the same for a glue graph of one row, and what it needs to make its input."""
        host = self._cleared()
        host["firsts"][0] = 0
        host["budgets"][0] = row.budget
        host["temperatures"][0] = row.temperature
        for length, limits in enumerate(row.limits):
            host["options"][length, : len(limits)] = limits
        host["given"].fill(-1)
        host["given"][: len(row.tokens)] = row.tokens
        host["wanted"][:3] = row.mode, row.number, row.length
        host["wanted"].view(np.uint64)[3] = row.prefix_hash
        host["wanted"][4] = row.place
        return self._arm(host)

    def disarm(self) -> None:
        """Glue passes leave the tree alone from now on."""
        if self._armed:
            self._cleared()["serial"][0] = 0
            self._staging.copy()
            self._armed = False

    def box(self, graph: StepGraph) -> CandidateBox:
        """Where the candidates of a glue graph's armed launches are shown."""
        return self._boxes[graph.rows, graph.num_blocks]

    def _cleared(self) -> dict[str, np.ndarray]:
        self._staging.wait()
        host = self._staging.host
        host["budgets"].fill(0)
        host["wanted"].fill(0)
        return host

    def _arm(self, host: dict[str, np.ndarray]) -> int:
        self._serial += 1
        host["serial"][0] = self._serial
        self._staging.copy()
        self._armed = True
        return self._serial

    def head(self, graph: StepGraph) -> None:
        if self._follower is None or graph.rows > 1:
            return
        inputs, own = graph.inputs, self._staging.tensors
        tree = self._tree_of(graph.rows, graph.num_blocks).inputs
        fed = Fed(
            inputs["tokens"],
            inputs["starts"],
            inputs["counts"],
            own["budgets"],
            own["limits"],
            tree["numbers"],
            tree["hashes"],
        )
        self._follower.feed(own["wanted"], own["given"], own["options"], fed)

    def tail(self, graph: StepGraph) -> None:
        out, given, own = graph.output, graph.inputs, self._staging.tensors
        if out.top_scores is None or out.top_tokens is None or out.next_scores is None:
            raise RuntimeError("the glue graph keeps no candidates")
        tree = self._tree_of(graph.rows, graph.num_blocks)
        n = out.top_scores.shape[-1]
        if n & (n - 1):
            return  # a vocabulary smaller than the candidates asked for
        branches = triton.next_power_of_2(tree.width)
        width = max(triton.next_power_of_2(graph.width), branches // n)
        to = tree.inputs
        _fork_kernel[(graph.rows,)](
            out.top_scores,
            out.top_tokens,
            out.next_scores,
            given["tokens"],
            given["starts"],
            given["counts"],
            given["seeds"],
            own["firsts"],
            own["budgets"],
            own["temperatures"],
            own["limits"],
            to["homes"],
            to["tokens"],
            to["positions"],
            to["slots"],
            to["live"],
            to["context_lens"],
            to["keys"],
            to["outcomes"],
            tree.rows * tree.width,
            self._scratch_start,
            graph.width,
            width,
            n,
            tree.width,
            branches,
            tree.steps,
            num_warps=max(1, min(8, width * n // _WARP_LANES)),
            **overlap(given["tokens"]),
        )
        key = (graph.rows, graph.num_blocks)
        if key not in self._boxes:
            self._boxes[key] = CandidateBox(graph.rows, graph.width, n, given["tokens"].device)
        self._boxes[key].export(own["serial"], out.top_tokens, out.top_scores, out.next_scores)


def able(vocab_size: int, candidates: int) -> bool:
    """Whether the kernel's tiles fit what a glue graph keeps."""
    n = min(vocab_size, candidates)
    return n & (n - 1) == 0
