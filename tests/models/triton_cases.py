"""Cases of test_triton_interpret, for a process that has TRITON_INTERPRET=1 from its start."""

from __future__ import annotations

import gc
import json
import multiprocessing
import random
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from ipc.messages.sampling import NoiseKey
from ipc.messages.target import Ahead, RowAhead, SeqStart, StepPlan
from ipc.messages.target import StepRow as StepPlanRow
from ipc.rundir import RunDir
from models.backends.cuda import CudaBackend, CudaOptions
from models.backends.reference import ReferenceBackend
from models.batch import ForwardBatch
from models.cuda import noise as cuda_noise
from models.cuda.candidates import MOST, best_scores, following_scores
from models.cuda.capture import GraphPool
from models.cuda.graph_runner import GraphRunner
from models.cuda.graphs import StepRow
from models.cuda.norms import silu_mul
from models.cuda.one_row import one_row_linear
from models.cuda.products import Tiling, few_rows_linear
from models.cuda.tiles import tiles_of
from models.cuda.tree_inputs import TreeInputs
from models.cuda.tree_runner import TreeRunner
from models.parallel import TensorParallel
from models.registry import load_model
from models.sequence_batch import build_batch
from ssd_pipe.config import Mode, PipelineConfig, config_from_mapping
from ssd_pipe.drafting import gpu_forks
from ssd_pipe.drafting.gpu_forks import GpuForks
from ssd_pipe.drafting.graphed_chains import GraphedChains
from ssd_pipe.drafting.trunk import Feed, Trunk
from ssd_pipe.engine.blocks import BlockTable
from ssd_pipe.engine.effort import Effort
from ssd_pipe.engine.speculation_cache import SpeculationCache
from ssd_pipe.sampling import noise, shared_noise
from ssd_pipe.sampling.filters import RowSampling
from ssd_pipe.verification.graphed import GraphedSteps
from tests.models import graph_ranks
from tests.models.interpreter import accept_scalars_of_numpy_2_4
from tests.models.tiny import make_tiny, perturbed, random_tokens
from tests.procs.test_target_steps import Desk
from tests.rounds.local_pipeline import LocalPipeline

BLOCK, BLOCKS = 4, 40


accept_scalars_of_numpy_2_4()
SMALL: dict[str, Any] = {
    "num_hidden_layers": 1,
    "vocab_size": 33,
    "hidden_size": 32,
    "intermediate_size": 32,
}
FUSED = CudaOptions(split=16, fused_width=64)
PLAIN = CudaOptions(split=16, few_tokens=0)
UNSPLIT = CudaOptions(split=16, split_tokens=0)


def backend(options: CudaOptions = FUSED) -> CudaBackend:
    return CudaBackend("cpu", torch.float32, options)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape
    assert float((actual - expected).norm()) <= 1e-5 * float(expected.norm())


def test_norms_and_gate_equal_torch() -> None:
    reference = ReferenceBackend("cpu", torch.float32)
    x, residual, weight = randn(3, 72), randn(3, 72, seed=1), randn(72, seed=2)
    close(backend().rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    for got, want in zip(
        backend().add_rms_norm(x, residual, weight, 1e-5),
        reference.add_rms_norm(x, residual, weight, 1e-5),
        strict=True,
    ):
        close(got, want)
    close(silu_mul(x), reference.silu_mul(x))


def test_the_product_of_one_row_equals_torch() -> None:
    k, n = 72, 40
    x, weight, bias = randn(1, k), randn(2 * n, k, seed=1), randn(2 * n, seed=2)
    norm, residual = randn(k, seed=3), randn(1, 2 * n, seed=4)
    normed = torch.nn.functional.rms_norm(x, (k,), norm, 1e-5)
    close(one_row_linear(x, weight, bias), x @ weight.T + bias)
    close(one_row_linear(x, weight, norm=norm, eps=1e-5), normed @ weight.T)
    close(one_row_linear(x, weight, residual=residual), x @ weight.T + residual)
    gate, up = (normed @ weight.T).chunk(2, dim=1)
    gated = one_row_linear(x, weight, norm=norm, eps=1e-5, gated=True)
    close(gated, torch.nn.functional.silu(gate) * up)
    with pytest.raises(ValueError, match="one_row_linear"):
        one_row_linear(x, weight[:, :-1].contiguous())


@pytest.mark.parametrize("cut", [None, Tiling(64, 32, 4, 3), Tiling(32, 32, 4, 2, shares=4)])
@pytest.mark.parametrize("rows", [1, 3, 17])
def test_products_of_few_rows_equal_torch(rows: int, cut: Tiling | None) -> None:
    """Columns and rows of the matrix are no multiples of the tile's."""
    k, n = 72, 40
    x, weight, bias = randn(rows, k), randn(2 * n, k, seed=1), randn(2 * n, seed=2)
    residual = randn(rows, 2 * n, seed=4)
    close(few_rows_linear(x, weight, bias, cut=cut), x @ weight.T + bias)
    close(few_rows_linear(x, weight, residual=residual, cut=cut), x @ weight.T + residual)
    gate, up = (x @ weight.T).chunk(2, dim=1)
    gated = few_rows_linear(x, weight, gated=True, cut=cut)
    close(gated, torch.nn.functional.silu(gate) * up)
    out = torch.full((rows, 2 * n), float("nan"))
    assert few_rows_linear(x, weight, out=out, cut=cut) is out
    close(out, x @ weight.T)
    with pytest.raises(ValueError, match="few_rows_linear"):
        few_rows_linear(x, weight[:, :-1].contiguous())


def test_tiles_hold_every_token_once_and_one_sequence_each() -> None:
    seqs = torch.tensor([2, 0, 2, 2, 0, 4, 2, 2], dtype=torch.int32)
    tiles = tiles_of(seqs, 5, 2)
    assert tiles.order is not None
    seen = []
    for seq, start, length in zip(
        tiles.seq.tolist(), tiles.start.tolist(), tiles.length.tolist(), strict=True
    ):
        members = tiles.order[start : start + length].tolist()
        assert len(members) <= 2
        assert all(int(seqs[m]) == seq for m in members)
        seen += members
    assert sorted(seen) == list(range(8))


@pytest.mark.parametrize("options", [FUSED, UNSPLIT], ids=["split", "unsplit"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 16), (4, 4, 24), (3, 1, 64)])
def test_attention_equals_the_reference(
    options: CudaOptions, heads: int, kv_heads: int, dim: int
) -> None:
    """Interleaved sequences, branches, and a token that sees nothing."""
    rng = np.random.default_rng(heads)
    tables = torch.from_numpy(rng.permutation(BLOCKS)[:36].reshape(3, 12).astype(np.int32))
    context = torch.tensor([37, 5, 37, 20, 48, 6, 1, 0], dtype=torch.int32)
    suffix_lens = torch.tensor([0, 2, 0, 1, 0, 3, 0, 0], dtype=torch.int32)
    suffix = torch.from_numpy(rng.integers(0, BLOCKS * BLOCK, (8, 3)).astype(np.int32))
    zeros = torch.zeros(8, dtype=torch.int64)
    seqs = torch.tensor([0, 1, 0, 2, 1, 1, 2, 0], dtype=torch.int32)

    def batch(n: int) -> ForwardBatch:
        return ForwardBatch(
            zeros[:n],
            zeros[:n],
            zeros[:n],
            seqs[:n],
            tables,
            context[:n],
            torch.arange(n),
            suffix[:n],
            suffix_lens[:n],
        )

    keys, values = (randn(BLOCKS, BLOCK, kv_heads, dim, seed=s) for s in (1, 2))
    q = randn(8, heads, dim)
    got = backend(options).attention(q, keys, values, batch(8), dim**-0.5)
    want = ReferenceBackend("cpu", torch.float32).attention(
        q[:7], keys, values, batch(7), dim**-0.5
    )
    close(got[:7], want)
    assert not got[7].any()


@pytest.mark.parametrize(
    ("family", "options"),
    [("llama", FUSED), ("qwen3", FUSED), ("llama", PLAIN)],
    ids=["llama-fused", "qwen3-fused", "llama-plain"],
)
def test_model_with_branches_equals_the_reference(
    tmp_path: Path, family: str, options: CudaOptions
) -> None:
    folder = make_tiny(tmp_path, family, attention_bias=True, **SMALL)
    models = [load_model(folder, backend=b) for b in (backend(options), "reference")]
    kvs = [model.make_kv(BLOCKS, BLOCK) for model in models]
    order = np.random.default_rng(3).permutation(BLOCKS).tolist()
    tables = [order[:6], order[6:12]]
    texts = [random_tokens(19, 33, 1), random_tokens(11, 33, 2)]
    scratch = order[12] * BLOCK

    def both(batch: ForwardBatch) -> None:
        got, want = (
            model.logits(model.forward(batch, kv)) for model, kv in zip(models, kvs, strict=True)
        )
        assert got is not None
        assert want is not None
        close(got, want)

    both(build_batch([(t, 0, x, len(x) - 3) for t, x in zip(tables, texts, strict=True)], BLOCK))
    both(build_batch([(tables[0], 19, [5], 0)], BLOCK))
    for step in range(2):
        count = 3
        slots = scratch + torch.arange(count) * 2
        both(
            ForwardBatch(
                tokens=torch.tensor([7, 8, 9]) + step,
                positions=torch.tensor([18, 9, 17]) + step,
                slots=slots + step,
                seqs=torch.tensor([0, 1, 0], dtype=torch.int32),
                block_tables=torch.tensor(tables, dtype=torch.int32),
                context_lens=torch.tensor([18, 9, 17], dtype=torch.int32),
                logit_index=torch.arange(count),
                suffix_slots=(slots[:, None] + torch.arange(2)).int(),
                suffix_lens=torch.full((count,), step + 1, dtype=torch.int32),
            )
        )


def test_noise_and_its_argmax_equal_the_samplers() -> None:
    rows, vocab = 4, 2500
    keys = noise.keys_to_tensor(noise.row_keys([3, 4, 5, 2**63], [7, 8, 9, 1], noise.SHARED))
    factors = torch.tensor([1.0, 2.0, 0.0, 0.6])
    logits = randn(rows, vocab) * 3
    want = logits * factors[:, None] + noise.gumbel(keys, vocab)
    want[2] = logits[2]
    scores = cuda_noise.noised_scores(logits, keys, factors)
    torch.testing.assert_close(scores, want, atol=4e-6, rtol=1e-6)
    chosen = cuda_noise.choose(logits, keys, factors)
    assert chosen.tolist() == want.argmax(dim=1).tolist()
    flat = torch.zeros(1, vocab)
    flat[0, [1100, 40, 2400]] = 2.0
    assert cuda_noise.choose(flat, keys[:1], torch.zeros(1)).tolist() == [40]
    values, ids = backend().sampling.noised_topk(logits, 5, factors, keys)
    torch.testing.assert_close(values, want.topk(5).values, atol=4e-6, rtol=1e-6)
    assert torch.equal(ids, want.topk(5).indices)


@pytest.mark.parametrize(
    ("vocab", "n"), [(33, 5), (33, 64), (2500, 64), (5000, MOST + 44), (20000, 3)]
)
def test_the_best_scores_come_in_order_and_the_lower_of_equals_first(vocab: int, n: int) -> None:
    keys = noise.keys_to_tensor(noise.row_keys([3, 4], [7, 8], noise.SHARED))
    logits = randn(2, vocab) * 3
    logits[1] = logits[1].round()  # a greedy row with many equal scores, some below zero
    factors = torch.tensor([1.0, 0.0])
    scores = cuda_noise.noised_scores(logits, keys, factors)
    want = scores.sort(dim=1, descending=True, stable=True)
    values, tokens = best_scores(logits, keys, factors, n)
    assert torch.equal(values, want.values[:, :n])
    assert torch.equal(tokens, want.indices[:, :n])
    fed = torch.tensor([[4, 30]])
    own = following_scores(logits, keys, factors, fed)
    assert own.tolist() == [[float(scores[0, 30]), float(scores[1, 4])]]


def test_steps_equal_the_reference_and_its_sampler(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, "llama", **SMALL)
    model, reference = (load_model(folder, backend=b) for b in (backend(PLAIN), "reference"))
    kv, reference_kv = model.make_kv(BLOCKS, BLOCK), reference.make_kv(BLOCKS, BLOCK)
    runner = GraphRunner(model, kv, 4, 24, top_n=3)
    order = np.random.default_rng(4).permutation(BLOCKS).tolist()
    tables = [order[:6], order[6:10], order[10:13]]
    texts = [random_tokens(9, 33, 1), random_tokens(3, 33, 2), random_tokens(1, 33, 3)]
    keys = [NoiseKey(5, 0.0), NoiseKey(6, 1.0), NoiseKey(2**63 + 1, 0.7)]
    before = [keys_of.clone() for keys_of in kv.keys]
    for start, stop in ((0, 6), (6, 9)):
        rows = [
            StepRow(table, start, text[start:stop], key.seed, key.temperature)
            for table, text, key in zip(tables, texts, keys, strict=True)
            if text[start:stop]
        ]
        out = runner.run(rows)
        logits = reference.logits(
            reference.forward(
                build_batch([(r.blocks, r.start, r.tokens, 0) for r in rows], BLOCK), reference_kv
            )
        )
        assert logits is not None
        assert out.top_tokens is not None
        at = 0
        for i, row in enumerate(rows):
            count = len(row.tokens)
            want = logits[at : at + count]
            at += count
            close(out.logits[i, :count], want)
            positions = np.arange(start + 1, start + 1 + count)
            sampling = RowSampling.from_keys([keys[i]], [count])
            chosen = shared_noise.choose(want, sampling, positions).tolist()
            assert out.chosen[i, :count].tolist() == chosen
            assert out.top_tokens[i, :count, 0].tolist() == chosen
    untouched = [b for b in range(BLOCKS) if b not in order[:13]]
    assert torch.equal(kv.keys[0][untouched], before[0][untouched])
    with pytest.raises(ValueError, match="row 0"):
        runner.run([StepRow(tables[2], 11, [1, 2])])


def test_steps_queued_before_their_tokens_are_known_choose_the_same(tmp_path: Path) -> None:
    """Rows that cross into new blocks, alone and beside another; then a step queued in vain."""
    folder = make_tiny(tmp_path, "llama", **SMALL)
    keys = [NoiseKey(), NoiseKey(6, 1.0)]
    texts = [random_tokens(1, 33, 1), random_tokens(1, 33, 2)]

    def decoded(ahead: bool) -> list[list[int]]:
        verifier = LocalPipeline(
            "ar", folder, folder, graph_config(), backend=backend(PLAIN), graphs=True
        ).verifier
        said: list[list[int]] = [[], []]
        rows = [StepPlanRow(i, 0, text, 0, True, [2 * i]) for i, text in enumerate(texts)]
        plan = StepPlan(1, rows, [SeqStart(i, i, key) for i, key in enumerate(keys)])
        for step in range(2, 8):
            more = [[2 * i + 1] if step == 5 else [] for i in range(2)]
            leave = Ahead(step - 1, rows=[RowAhead(0, 9, [], blocks) for blocks in more])
            queued: list[bool] = []
            ask = partial(lambda p, a, q: q.append(verifier.go_on(p, a)), plan, leave, queued)
            outcomes = verifier.run(plan, ask if ahead else None).outcomes
            assert not ahead or queued == [True]
            for tokens, outcome in zip(said, outcomes, strict=True):
                tokens.append(outcome.token)
            rows = [StepPlanRow(i, step - 1, [said[i][-1]], 0, True, more[i]) for i in range(2)]
            plan = StepPlan(step, rows)
            if ahead and step < 7:
                assert verifier.queue(plan, begun=True)
        # The rows end; what is queued is void, and their blocks are another's.
        other = StepPlanRow(1, 0, texts[0], 0, True, [3, 2])
        plan = StepPlan(8, [other], [SeqStart(2, 1, keys[0])], drop=[0, 1])
        for start in range(1, 5):
            token = verifier.run(plan).outcomes[0].token
            said[0].append(token)
            plan = StepPlan(8 + start, [StepPlanRow(1, start, [token], 0, True, [])])
        return said

    planned = decoded(ahead=False)
    assert decoded(ahead=True) == planned
    assert planned[0][:4] == planned[0][6:]


def test_drafted_chains_do_not_depend_on_what_was_queued_ahead(tmp_path: Path) -> None:
    """Two rows of which one leaves in mid-chain, and a pass that was queued for nothing."""
    model = load_model(make_tiny(tmp_path, "llama", **SMALL), backend=backend(PLAIN))
    texts = [random_tokens(2, 33, 1), random_tokens(3, 33, 2)]
    keys = [NoiseKey(), NoiseKey(6, 1.0)]

    def drafted(again: bool) -> tuple[list[list[int]], int]:
        chains = GraphedChains(model, model.make_kv(BLOCKS, BLOCK), 3, 2, 24, GraphPool())
        trunks = [
            Trunk(i, i, key, text, BlockTable(list(range(4 * i, 4 * i + 4))))
            for i, (key, text) in enumerate(zip(keys, texts, strict=True))
        ]
        said: list[list[int]] = [[], []]
        feeds: list[Feed] = [(t, 0, t.tokens, 0) for t in trunks]
        for _ in range(3):
            tokens = chains.next_tokens(feeds, again)
            assert tokens is not None
            for chain, token in zip(said, tokens, strict=True):
                chain.append(token)
            feeds = [
                (t, len(t.tokens) + len(chain) - 1, chain[-1:], 0)
                for t, chain in zip(trunks, said, strict=True)
            ]
        # What was queued for both rows is of no use for one of them.
        for _ in range(2):
            [token] = chains.next_tokens(feeds[:1], again) or []
            said[0].append(token)
            feeds = [(trunks[0], len(texts[0]) + len(said[0]) - 1, said[0][-1:], 0)]
        return said, chains._runner.graph(2, 1, 4).launches

    plain, passes = drafted(again=False)
    assert (plain, passes + 1) == drafted(again=True)  # one was in vain, none was made twice


def test_graphs_go_as_soon_as_nobody_holds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their collectives must be gone before the group is; a cycle would keep them."""
    # A captured graph's replay knows nothing of what it was captured from.
    monkeypatch.setattr(GraphPool, "capture", lambda *_: lambda: None)
    model = load_model(make_tiny(tmp_path, "llama", **SMALL), backend=backend(PLAIN))
    steps = GraphedSteps(model, model.make_kv(BLOCKS, BLOCK), 1, 24, (1,))
    gc.disable()
    try:
        steps.run([([0], NoiseKey(), StepPlanRow(0, 0, [3], 0, True, [0]))])
        posting = weakref.ref(steps._runner.graph(1, 1, 1).posting)
        assert posting() is not None
        steps.close()
        assert posting() is None
    finally:
        gc.enable()


def test_a_target_on_graphs_goes_on_before_it_knows_its_tokens(tmp_path: Path) -> None:
    with RunDir.create(tmp_path, "r") as rundir:
        folder = make_tiny(tmp_path, "llama", **SMALL)
        desk = Desk(folder, rundir, backend=backend(PLAIN), graphs=True)
        token = desk.begin().outcomes[0].token
        planned = [desk.decode(2, 3, token)[0]]
        planned += desk.decode(3, 4, planned[0].outcomes[0].token)
        desk.allow(after=2)
        both = desk.decode(2, 3, token)
        assert [result.step for result in both] == [2, 3]
        assert [r.outcomes for r in both] == [r.outcomes for r in planned]
        desk.allow(after=2, stops=[planned[0].outcomes[0].token])
        assert len(desk.decode(2, 3, token)) == 1  # the next one was queued in vain
        assert desk.decode(3, 4, planned[0].outcomes[0].token)[0].outcomes == planned[1].outcomes
        desk.allow(after=2)
        desk.plans.send(Ahead(2))
        assert len(desk.decode(2, 3, token)) == 1


def test_tree_equals_branches_run_one_by_one(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, "qwen3", **SMALL)
    model, reference = (load_model(folder, backend=b) for b in (backend(PLAIN), "reference"))
    kv = model.make_kv(BLOCKS, BLOCK)
    order = np.random.default_rng(5).permutation(BLOCKS).tolist()
    tables = [order[:4], order[4:8]]
    texts = [random_tokens(13, 33, 1), random_tokens(7, 33, 2)]
    rows = [(t, 0, x, len(x)) for t, x in zip(tables, texts, strict=True)]
    model.forward(build_batch(rows, BLOCK), kv)
    steps = 3
    seqs, contexts = np.array([0, 0, 0, 1]), np.array([13, 12, 12, 5])
    keys = [NoiseKey(1, 0.0)] * 3 + [NoiseKey(7, 1.0)]
    positions = contexts.astype(np.int64)
    tree = TreeInputs(
        tokens=np.array([4, 5, 6, 7]),
        positions=positions,
        context_lens=contexts,
        seqs=seqs,
        tables=tables,
        scratch=order[8] * BLOCK + np.arange(4) * steps,
        keys=np.stack(
            [
                noise.row_keys([k.seed for k in keys], positions + step + 1, noise.SHARED)
                for step in range(steps)
            ]
        ),
        temperature=np.array([k.temperature for k in keys]),
    )
    runner = TreeRunner(model, kv, steps, 2, 4, 16)
    chosen = runner.run(tree)
    assert chosen.shape == (steps, 4)
    for i, key in enumerate(keys):
        text = [*texts[seqs[i]][: contexts[i]], int(tree.tokens[i])]
        grown = []
        for _ in range(steps):
            reference_kv = reference.make_kv(6, BLOCK)
            batch = build_batch([(range(6), 0, text, len(text) - 1)], BLOCK)
            logits = reference.logits(reference.forward(batch, reference_kv))
            assert logits is not None
            sampling = RowSampling.from_keys([key])
            token = int(shared_noise.choose(logits, sampling, [len(text)])[0])
            grown.append(token)
            text = [*text, token]
        assert chosen[:, i].tolist() == grown
    with pytest.raises(ValueError, match="branches in a graph"):
        TreeRunner(model, kv, steps, 2, 2, 16).run(tree)


def graph_config(**speculation: Any) -> PipelineConfig:
    return config_from_mapping(
        {
            "speculation": {"k": 2, "fan_out": 2} | speculation,
            "scheduler": {"max_num_seqs": 3, "max_model_len": 40, "max_batched_tokens": 16},
            "cache": {"block_size": 4},
        }
    )


@pytest.mark.parametrize(("mode", "k"), [("sd", 3), ("ssd", 2)])
def test_rounds_on_graphs_emit_what_the_target_alone_does(
    tmp_path: Path, mode: Mode, k: int
) -> None:
    """Greedy, sampled and filtered rows; with the last, the graphs leave the choice to torch."""
    target = make_tiny(tmp_path, "llama", **SMALL | {"vocab_size": 13})
    draft = perturbed(target, tmp_path / "near", 0.15)
    config = graph_config(k=k)
    keys = [NoiseKey(), NoiseKey(seed=3, temperature=1.0), NoiseKey(4, 1.0, 0.8)]
    texts = [random_tokens(n, 13, n) for n in (3, 9, 5)]

    def emitted(mode: Mode, **how: Any) -> dict[int, list[int]]:
        pipeline = LocalPipeline(mode, target, draft, config, **how)
        for rid, (text, key) in enumerate(zip(texts, keys, strict=True)):
            pipeline.add(rid, text, 5, key)
        outputs = pipeline.run()
        if mode == "ssd":
            assert pipeline.planner.counters.hits > 0
            assert pipeline.planner.counters.accepted > 0
        return outputs

    assert emitted(mode, backend=backend(PLAIN), graphs=True) == emitted("ar")


@pytest.mark.parametrize(
    ("allocation", "workers"), [("confidence", 1), ("uniform", 1), ("confidence", 2)]
)
def test_branches_that_the_gpu_chooses_are_those_that_the_host_would(
    tmp_path: Path, allocation: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that come and go, alone and together, with rounds of less effort between."""
    target = make_tiny(tmp_path, "llama", **SMALL | {"vocab_size": 16})
    draft = perturbed(target, tmp_path / "near", 0.15)
    config = graph_config(allocation=allocation)
    config = replace(config, draft=replace(config.draft, workers=workers))
    fork, forked = GpuForks.fork, Counter[bool]()

    def published(by_gpu: bool) -> list[Any]:
        pipeline = LocalPipeline(
            "ssd", target, draft, config, backend=backend(PLAIN), graphs=True, seed=2
        )
        pipeline.efforts = [pipeline.planner.effort, Effort(1, 3)]
        said: list[Any] = []

        def heard(cache: SpeculationCache, name: str) -> Callable[..., None]:
            tell = getattr(cache, name)

            def told(*args: Any) -> None:
                said.append((name, *(np.asarray(arg).tolist() for arg in args if arg is not None)))
                tell(*args)

            return told

        def counted(forks: GpuForks, *args: Any) -> Any:
            found = fork(forks, *args) if by_gpu else None
            forked[by_gpu] += found is not None
            return found

        monkeypatch.setattr(GpuForks, "fork", counted)
        for speculator in pipeline.speculators:
            for name in ("begin_round", "publish_depth", "pass_over"):
                monkeypatch.setattr(speculator._cache, name, heard(speculator._cache, name))
        for rid, temperature in enumerate((0.0, 1.0, 0.7)):
            key = NoiseKey(seed=rid, temperature=temperature)
            pipeline.add(rid, random_tokens(3 + 2 * rid, 16, rid), 4 + 3 * rid, key)
        pipeline.run()
        assert pipeline.planner.counters.hits > 3
        return said

    host = published(by_gpu=False)
    assert len(host) > 20
    assert published(by_gpu=True) == host
    assert forked[True] > 3
    assert forked[False] == 0


def test_rounds_that_are_cut_short_leave_nothing_wrong_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every chain of a draft equal to its target is accepted, so each must be the one that was
    asked for, though trees are left before their branches are known, or between two tokens."""
    target = make_tiny(tmp_path, "llama", **SMALL | {"vocab_size": 16})
    rng, cut, wait = random.Random(3), Counter[bool](), gpu_forks.wait_until

    def interrupted(done: Callable[[], bool], *interrupt: Callable[[], bool]) -> bool:
        leave = bool(interrupt) and rng.random() < 0.3
        cut[leave] += bool(interrupt)
        return not leave and wait(done, *interrupt)

    monkeypatch.setattr(gpu_forks, "wait_until", interrupted)
    pipeline = LocalPipeline(
        "ssd", target, target, graph_config(), backend=backend(PLAIN), graphs=True, haste=0.1
    )
    for rid, temperature in enumerate((0.0, 1.0, 0.7)):
        key = NoiseKey(seed=rid, temperature=temperature)
        pipeline.add(rid, random_tokens(4 + rid, 16, rid), 26, key)
    pipeline.run()
    counters = pipeline.planner.counters
    assert min(cut[True], cut[False], counters.hits) > 5
    assert counters.accepted == counters.drafted > 0


def test_two_ranks_on_graphs_choose_alike_and_as_one_does(tmp_path: Path) -> None:
    """Over gloo: the collectives stand where NCCL's stand inside a CUDA graph."""
    folder = make_tiny(tmp_path, "llama", **SMALL)
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(
            target=graph_ranks.rank_main, args=(r, 2, str(folder), "cpu", "float32"), daemon=True
        )
        for r in range(2)
    ]
    for process in ranks:
        process.start()
    alone = graph_ranks.outcomes_of(folder, TensorParallel(), backend(CudaOptions(split=16)))
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [0, 0]
    first, second = (json.loads((folder / f"rank-{r}.json").read_text()) for r in range(2))
    assert first["chosen"] == second["chosen"]
    assert second["outcomes"] == [[], [], []]
    assert first == json.loads(json.dumps(alone))


@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_rejection_on_graphs_judges_with_what_was_handed_over(tmp_path: Path, mode: Mode) -> None:
    """A draft equal to the target is always accepted, which takes the right q for every token."""
    target = make_tiny(tmp_path, "llama", **SMALL | {"vocab_size": 13})
    config = graph_config(rule="rejection", backup="jit")
    pipeline = LocalPipeline(mode, target, target, config, backend=backend(PLAIN), graphs=True)
    for rid, key in enumerate((NoiseKey(3, 1.0), NoiseKey(4, 0.9, 0.9, 6, 0.02))):
        pipeline.add(rid, random_tokens(4 + rid, 13, rid), 5, key)
    outputs = pipeline.run()
    assert [len(tokens) for tokens in outputs.values()] == [5, 5]
    counters = pipeline.planner.counters
    assert counters.accepted == counters.drafted > 0
    assert mode == "sd" or counters.hits > 0
