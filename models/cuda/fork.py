"""The choice of branches on the GPU, between the glue pass and the tree that extends them.

What ``drafting.candidates`` and ``engine.fanout`` do on the host, in float32: from noised scores
after each prefix of the chain, the chance of outcome (k, t*) is that of reaching k times that of t*
there, under a softmax with the calibrated temperature; the most likely ones become the tree's
first tokens. The tree can then be launched right behind the glue pass. Of several draft workers
each takes its share of them, every N-th from one of the first N on (``engine.partition``).
"""
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from models.cuda.candidates import pack, unpack
from models.cuda.graphs import StepGraph
from models.cuda.noise import mix_key
from models.cuda.overlap import after_previous, overlap
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
    ranks,
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
    WORKERS: tl.constexpr,
    RANKED_P: tl.constexpr,
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
        better = tl.cumsum(open_to.to(tl.int32), axis=1) - 1
        limit = tl.load(limits + row * WIDTH + i, mask=inside, other=0)
        open_to = open_to & (better < limit[:, None])
        chance = tl.where(open_to, reach[:, None] * weight / total[:, None], -1.0)
        lane = tl.arange(0, WIDTH_P * N)
        best_first = tl.topk(pack(tl.reshape(chance, (WIDTH_P * N,)), lane), RANKED_P)
        peak, where = unpack(best_first)
        rank = tl.arange(0, RANKED_P)
        e = rank // WORKERS
        exists = (rank % WORKERS == tl.load(ranks + row)) & (e < BRANCHES)
        alive = (rank < budget) & (peak >= 0.0)
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


def choose_branches(
    glue: StepGraph,
    tree: TreeGraph,
    how: dict[str, torch.Tensor],
    scratch_start: int,
    workers: int = 1,
) -> None:
    """Queue the choice: the first tokens of ``tree`` out of what ``glue`` keeps.

    Args:
        how: of each row, "firsts" int64 [R], index among the tokens fed of the one before the
            chain; "ranks" int32 [R], that of the first branch that is the tree's, which gets every
            ``workers``-th from there on; "budgets" int32 [R], most branches of all workers
            together, 0 leaves the tree's row alone; "temperatures" float32 [R] of the softmax over
            scores; "limits" int32 [R, W], most branches at each accepted length.
        scratch_start: see ``GraphedDraft``.
    """
    out, given, to = glue.output, glue.inputs, tree.inputs
    if out.top_scores is None:
        raise RuntimeError("the glue graph keeps no candidates")
    n = out.top_scores.shape[-1]
    ranked = triton.next_power_of_2(tree.width * workers)
    width = max(triton.next_power_of_2(glue.width), ranked // n)
    _fork_kernel[(glue.rows,)](
        out.top_scores,
        out.top_tokens,
        out.next_scores,
        given["tokens"],
        given["starts"],
        given["counts"],
        given["seeds"],
        how["firsts"],
        how["ranks"],
        how["budgets"],
        how["temperatures"],
        how["limits"],
        to["homes"],
        to["tokens"],
        to["positions"],
        to["slots"],
        to["live"],
        to["context_lens"],
        to["keys"],
        to["outcomes"],
        tree.rows * tree.width,
        scratch_start,
        glue.width,
        width,
        n,
        tree.width,
        workers,
        ranked,
        tree.steps,
        num_warps=max(1, min(8, width * n // _WARP_LANES)),
        **overlap(given["tokens"]),
    )


def able(vocab_size: int, candidates: int) -> bool:
    """Whether the kernel's tiles fit what a glue graph keeps."""
    n = min(vocab_size, candidates)
    return n & (n - 1) == 0
