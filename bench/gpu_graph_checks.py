"""Graphs on the GPU against the same kernels launched one by one."""

from __future__ import annotations

import numpy as np
import torch

from bench.gpu_checks import BLOCK, DTYPES, build_pair, check, small_shapes
from bench.gpu_common import Report
from models.backends.cuda import CudaOptions
from models.cuda.capture import GraphOptions
from models.cuda.graph_runner import GraphRunner
from models.cuda.graphs import StepRow
from models.cuda.tree_inputs import TreeInputs
from models.cuda.tree_runner import TreeRunner
from models.kv_cache import KVCache
from models.transformer import Transformer


def check_graphs(report: Report, device: str = "cuda") -> None:
    """Replayed graphs equal the same kernels launched one by one, bit for bit, and again when
    replayed for other rows and back."""
    for family, config in small_shapes().items():
        for dtype in DTYPES:
            model, _ = build_pair(config, dtype, device, CudaOptions(split=64))
            outcomes = []
            for eager in (False, True):
                kv = model.make_kv(64, BLOCK)
                options = GraphOptions(enforce_eager=eager)
                runner = GraphRunner(model, kv, 4, 512, top_n=64, options=options)
                outcomes.append(_run_steps(model, kv, runner, options, config.vocab_size))
            differing = sum(int(not torch.equal(a, b)) for a, b in zip(*outcomes, strict=True))
            name = f"graph equals eager {family} {str(dtype)[6:]}: tensors that differ"
            check(report, name, float(differing), 0.0)


def _run_steps(
    model: Transformer, kv: KVCache, runner: GraphRunner, options: GraphOptions, vocab: int
) -> list[torch.Tensor]:
    rng = np.random.default_rng(3)
    order = rng.permutation(64)
    tables = [order[:12].tolist(), order[12:24].tolist(), order[24:36].tolist()]
    results = []
    starts = [0, 0, 0]
    for width in (6, 1, 6, 1, 1, 6):
        rows = []
        for i, table in enumerate(tables):
            count = int(rng.integers(1, width + 1))
            tokens = rng.integers(0, vocab, count).tolist()
            rows.append(StepRow(table, starts[i], tokens, seed=i, temperature=0.5 * i))
            starts[i] += count
        out = runner.run(rows, width)
        assert out.top_scores is not None
        for i, row in enumerate(rows):
            n = len(row.tokens)
            results += [out.chosen[i, :n].clone(), out.logits[i, :n].clone()]
            results.append(out.top_scores[i, :n].clone())
    seqs = np.array([0] * 5 + [1] * 2 + [2] * 3)
    context = np.array([starts[s] for s in seqs]) - np.arange(10) % 3
    scratch = np.concatenate([order[36 + i] * BLOCK + np.arange(0, 15, 5) for i in range(4)])
    tree = TreeInputs(
        tokens=rng.integers(0, vocab, 10),
        positions=context.astype(np.int64),
        context_lens=context,
        seqs=seqs,
        tables=tables,
        scratch=scratch[:10].astype(np.int64),
        keys=rng.integers(0, 2**62, (5, 10)),
        temperature=np.where(seqs == 0, 0.0, 1.0),
    )
    runner_of_trees = TreeRunner(model, kv, 5, 4, 6, 512, options=options)
    results.append(runner_of_trees.run(tree).clone())
    results.append(runner_of_trees.run(tree).clone())
    return results
