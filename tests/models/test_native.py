"""The compiled kernels against float64 references, and bitwise against themselves."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

import models.native
from models.backends.native import NativeBackend
from models.batch import ForwardBatch
from models.native import NativeUnavailable
from models.native.build import built_library
from models.native.sampling import (
    gumbel_rows,
    head_argmax,
    noised_argmax,
    noised_topk,
)


@pytest.fixture(scope="module")
def backend() -> NativeBackend:
    return NativeBackend()


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    assert got.shape == want.shape
    assert torch.isfinite(got).all()
    error = (got.double() - want.double()).abs().max().item()
    assert error <= tolerance * max(1.0, want.abs().max().item()), error


# ---------------------------------------------------------------- linear


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (1, 16, 8),
        (1, 333, 77),
        (2, 64, 31),
        (3, 17, 5),
        (5, 100, 64),
        (6, 50, 129),
        (7, 1, 1),
        (8, 47, 33),
        (13, 80, 40),
        (100, 70, 96),
        (131, 35, 3),
    ],
)
def test_linear_matches_float64(
    backend: NativeBackend, rng: torch.Generator, dtype: torch.dtype, m: int, n: int, k: int
) -> None:
    weight = torch.randn(n, k, generator=rng).to(dtype)
    x, bias = torch.randn(m, k, generator=rng), torch.randn(n, generator=rng)
    packed = backend.pack(weight)
    want = x.double() @ weight.double().T
    close(backend.linear(x, packed, None), want, 2e-6)
    close(backend.linear(x, packed, bias), want + bias.double(), 2e-6)
    rows = torch.randint(0, n, (4,), generator=rng)
    assert torch.equal(packed.rows(rows), weight[rows].float())


def test_linear_takes_strided_rows_and_strided_weights(
    backend: NativeBackend, rng: torch.Generator
) -> None:
    wide, x = torch.randn(40, 90, generator=rng), torch.randn(5, 200, generator=rng)
    packed = backend.pack(wide[:, 20:70])
    close(backend.linear(x[:, 30:80], packed, None), x[:, 30:80] @ wide[:, 20:70].T, 3e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_linear_is_bitwise_the_same_for_any_batch_and_thread_count(
    backend: NativeBackend, rng: torch.Generator, dtype: torch.dtype
) -> None:
    packed = backend.pack(torch.randn(203, 301, generator=rng).to(dtype))
    x = torch.randn(97, 301, generator=rng)
    alone = torch.cat([backend.linear(row[None], packed, None) for row in x])
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for m in (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 17, 24, 25, 48, 97):
            start = int(torch.randint(0, 98 - m, (1,), generator=rng))
            got = backend.linear(x[start : start + m], packed, None)
            assert torch.equal(got, alone[start : start + m]), (threads, m)


# ---------------------------------------------------------------- row-wise operations


@pytest.mark.parametrize("n", [1, 7, 64, 576, 1001])
def test_norms_and_activation_match_float64(
    backend: NativeBackend, rng: torch.Generator, n: int
) -> None:
    x, residual = torch.randn(2, 9, n, generator=rng) * 3
    weight = torch.randn(n, generator=rng)

    def norm(v: torch.Tensor) -> torch.Tensor:
        v = v.double()
        return v * (v.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()

    close(backend.rms_norm(x, weight, 1e-5), norm(x), 1e-6)
    normed, total = backend.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    close(normed, norm(total), 1e-6)
    gate_up = torch.randn(9, 2 * n, generator=rng) * 20
    gate, up = gate_up.double().chunk(2, -1)
    close(backend.silu_mul(gate_up), torch.nn.functional.silu(gate) * up, 1e-6)
    assert torch.equal(backend.silu_mul(gate_up)[4], backend.silu_mul(gate_up[4:5])[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_embed_widens_rows(
    backend: NativeBackend, rng: torch.Generator, dtype: torch.dtype
) -> None:
    table = torch.randn(50, 33, generator=rng).to(dtype)
    tokens = torch.randint(0, 50, (12,), generator=rng)
    assert torch.equal(backend.embed(tokens, table), table[tokens].float())


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dim", [64, 20, 6])
def test_rope_and_store_matches_float64(
    backend: NativeBackend, rng: torch.Generator, dim: int, normed: bool
) -> None:
    heads, kv_heads, tokens = 6, 2, 5
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, generator=rng)
    angles = torch.rand(40, dim // 2, generator=rng) * 6
    cos, sin = angles.cos(), angles.sin()
    q_norm, k_norm = torch.randn(2, dim, generator=rng)
    batch = random_batch(rng, tokens, block_size=4, blocks=12)
    k_cache = torch.full((12, 4, kv_heads, dim), float("nan"))
    v_cache = k_cache.clone()
    norms = (q_norm, k_norm) if normed else (None, None)
    q = backend.rope_and_store(
        qkv, heads, kv_heads, dim, cos, sin, *norms, 1e-6, batch, k_cache, v_cache
    )

    def rotated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = x.double()
        if normed:
            x = x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
        a, b = x.chunk(2, -1)
        c, s = (t[batch.positions, None].double() for t in (cos, sin))
        return torch.cat([a * c - b * s, b * c + a * s], -1)

    wq, wk, wv = qkv.view(tokens, -1, dim).split([heads, kv_heads, kv_heads], 1)
    close(q, rotated(wq, q_norm), 1e-6)
    flat_k, flat_v = k_cache.view(-1, kv_heads, dim), v_cache.view(-1, kv_heads, dim)
    close(flat_k[batch.slots], rotated(wk, k_norm), 1e-6)
    assert torch.equal(flat_v[batch.slots], wv)
    untouched = torch.ones(48, dtype=torch.bool)
    untouched[batch.slots] = False
    assert flat_k[untouched].isnan().all()
    assert flat_v[untouched].isnan().all()


# ---------------------------------------------------------------- attention


def random_batch(
    rng: torch.Generator, tokens: int, block_size: int, blocks: int, suffix: int = 0
) -> ForwardBatch:
    """Tokens of three sequences at random context lengths over scattered blocks."""
    width = blocks // 3
    order = torch.randperm(blocks, generator=rng)[: 3 * width]
    slots = torch.randperm(blocks * block_size, generator=rng)
    lens = torch.randint(0, suffix + 1, (tokens,), generator=rng) if suffix else None
    low = torch.ones(1) if lens is None else (lens == 0).float()
    context = (torch.rand(tokens, generator=rng) * (width * block_size + 1 - low) + low).int()
    return ForwardBatch(
        tokens=torch.zeros(tokens, dtype=torch.int64),
        positions=torch.randint(0, 40, (tokens,), generator=rng),
        slots=slots[:tokens],
        seqs=torch.randint(0, 3, (tokens,), generator=rng).int(),
        block_tables=order.view(3, width).int(),
        context_lens=context,
        logit_index=torch.arange(tokens),
        suffix_slots=None if lens is None else slots[: tokens * suffix].view(tokens, suffix),
        suffix_lens=None if lens is None else lens.int(),
    )


def visible_slots(batch: ForwardBatch, token: int, block_size: int) -> torch.Tensor:
    """By the definition in ForwardBatch."""
    position = torch.arange(int(batch.context_lens[token]))
    table = batch.block_tables[int(batch.seqs[token])].long()
    slots = table[position // block_size] * block_size + position % block_size
    if batch.suffix_slots is None or batch.suffix_lens is None:
        return slots
    return torch.cat([slots, batch.suffix_slots[token, : int(batch.suffix_lens[token])]])


@pytest.mark.parametrize("suffix", [0, 7])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 2, 128), (2, 2, 8), (6, 1, 20), (3, 3, 5)]
)
def test_attention_matches_naive_gather(
    backend: NativeBackend,
    rng: torch.Generator,
    heads: int,
    kv_heads: int,
    dim: int,
    suffix: int,
) -> None:
    tokens, block_size, blocks = 21, 16, 24
    batch = random_batch(rng, tokens, block_size, blocks, suffix)
    q = torch.randn(tokens, heads, dim, generator=rng) * 3
    k_cache, v_cache = torch.randn(2, blocks, block_size, kv_heads, dim, generator=rng)
    seen = [visible_slots(batch, t, block_size) for t in range(tokens)]
    hidden = torch.ones(blocks * block_size, dtype=torch.bool)
    hidden[torch.cat(seen)] = False
    for cache in (k_cache, v_cache):
        cache.view(-1, kv_heads, dim)[hidden] = float("nan")  # must never be read into a result
    keys, values = (c.view(-1, kv_heads, dim).double() for c in (k_cache, v_cache))
    got = backend.attention(q, k_cache, v_cache, batch, 0.2)
    for t in range(tokens):
        k, v = (
            c[seen[t]].repeat_interleave(heads // kv_heads, 1).transpose(0, 1)
            for c in (keys, values)
        )
        p = torch.softmax(k @ q[t].double().unsqueeze(-1) * 0.2, dim=1)
        close(got[t].view(heads, dim), (p * v).sum(1), 2e-6)
    torch.set_num_threads(2)
    batch.plan = None
    assert torch.equal(backend.attention(q, k_cache, v_cache, batch, 0.2), got)


def test_attention_is_bitwise_the_same_alone_and_in_trunk_or_suffix(
    backend: NativeBackend, rng: torch.Generator
) -> None:
    heads, kv_heads, dim, block_size = 6, 2, 64, 8
    k_cache, v_cache = torch.randn(2, 40, block_size, kv_heads, dim, generator=rng)
    q = torch.randn(12, heads, dim, generator=rng)
    order = torch.randperm(40, generator=rng).view(4, 10).int()
    zero = torch.zeros(12, dtype=torch.int64)

    def batch(rows: slice, split: int | None) -> ForwardBatch:
        """Token i sees 60 + i positions; the last ones as a suffix if ``split`` of them."""
        count = len(range(12)[rows])
        total = torch.arange(60, 72)[rows].int()
        table = order[1].long()
        suffix = lens = None
        if split is not None:
            place = (total.long() - split)[:, None] + torch.arange(split)
            suffix = table[place // block_size] * block_size + place % block_size
            lens = torch.full((count,), split, dtype=torch.int32)
        return ForwardBatch(
            tokens=zero[rows],
            positions=zero[rows],
            slots=zero[rows],
            seqs=torch.ones(count, dtype=torch.int32),
            block_tables=order,
            context_lens=total - (split or 0),
            logit_index=zero[rows],
            suffix_slots=suffix,
            suffix_lens=lens,
        )

    together = backend.attention(q, k_cache, v_cache, batch(slice(0, 12), None), 0.125)
    for i in range(12):
        rows = slice(i, i + 1)
        alone = backend.attention(q[rows], k_cache, v_cache, batch(rows, None), 0.125)
        assert torch.equal(alone, together[rows])
    for split in (1, 5, 40):
        branch = backend.attention(q, k_cache, v_cache, batch(slice(0, 12), split), 0.125)
        assert torch.equal(branch, together)


# ---------------------------------------------------------------- noise and sampling


def numpy_uniform(keys: np.ndarray, vocab: int) -> np.ndarray:
    """float32 uniforms by the definition, in uint64 arithmetic."""
    with np.errstate(over="ignore"):
        z = keys[:, None] + np.arange(1, vocab + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    h = (z >> np.uint64(32)).astype(np.uint32).astype(np.float32)
    u = (h + np.float32(0.5)) * np.float32(2.0**-32)
    return np.minimum(u, np.float32(1 - 2.0**-24))


def random_keys(rng: torch.Generator, count: int) -> torch.Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=rng)


def as_uint64(keys: torch.Tensor) -> np.ndarray:
    return keys.numpy().view(np.uint64)


@pytest.mark.parametrize("vocab", [1, 8, 13, 60_001])
def test_noise_matches_its_definition(rng: torch.Generator, vocab: int) -> None:
    keys = random_keys(rng, 5)
    u = numpy_uniform(as_uint64(keys), vocab).astype(np.float64)
    want = -np.log(-np.log1p(-u))
    got = gumbel_rows(keys, vocab).numpy()
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= 2e-6  # the logarithm of a rounded logarithm
    assert torch.equal(gumbel_rows(keys.view(torch.uint64), vocab), torch.from_numpy(got))


def test_noise_follows_the_gumbel_distribution(rng: torch.Generator) -> None:
    noise = gumbel_rows(random_keys(rng, 4), 50_000).flatten().numpy()
    assert stats.kstest(noise, stats.gumbel_r.cdf).pvalue > 1e-5


def scores_of(logits: torch.Tensor, inverse: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    greedy = (inverse == 0)[:, None]
    noised = logits * inverse[:, None] + gumbel_rows(keys, logits.shape[1])
    return torch.where(greedy, logits, noised)


@pytest.mark.parametrize("vocab", [1, 9, 1000, 8193])
def test_argmax_and_topk_choose_by_score(rng: torch.Generator, vocab: int) -> None:
    rows, count = 12, 17
    logits = torch.randn(rows, vocab, generator=rng) * 4
    logits[:, ::5] = float("-inf")
    logits[3:6] = logits[3:6].round()  # ties, in greedy rows too
    inverse = torch.rand(rows, generator=rng) * 3 + 0.01
    inverse[::3] = 0
    keys = random_keys(rng, rows)
    scores = scores_of(logits, inverse, keys)
    want, order = torch.sort(scores, descending=True, stable=True)
    values, index = noised_argmax(logits, inverse, keys)
    some = want[:, 0] > float("-inf")
    assert torch.equal(index[some], order[some, 0])
    assert torch.equal(values, want[:, 0])
    top, ids = noised_topk(logits, count, inverse, keys)
    reach = min(count, vocab)
    real = want[:, :reach] > float("-inf")
    assert torch.equal(top[:, :reach], want[:, :reach])
    assert torch.equal(ids[:, :reach][real], order[:, :reach][real])
    assert (ids[:, :reach][~real] == -1).all()
    assert (ids[:, reach:] == -1).all()
    torch.set_num_threads(2)
    assert torch.equal(noised_topk(logits, count, inverse, keys)[1], ids)
    greedy = noised_argmax(logits)[1]
    assert torch.equal(greedy[some], logits.argmax(-1)[some])


def test_topk_refuses_a_count_out_of_range() -> None:
    for count in (0, 65):
        with pytest.raises(ValueError, match=r"1\.\.64"):
            noised_topk(torch.zeros(1, 100), count)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fused_head_equals_linear_and_argmax(
    backend: NativeBackend, rng: torch.Generator, dtype: torch.dtype
) -> None:
    packed = backend.pack((torch.randn(1003, 64, generator=rng) / 4).to(dtype))
    x = torch.randn(14, 64, generator=rng)
    inverse = torch.rand(14, generator=rng) * 2
    inverse[2:5] = 0
    keys = random_keys(rng, 14)
    logits = backend.linear(x, packed, None)
    want_values, want = noised_argmax(logits, inverse, keys)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        values, index = head_argmax(x, packed, inverse, keys)
        assert torch.equal(index, want)
        assert torch.equal(values, want_values)
        assert torch.equal(head_argmax(x, packed)[1], logits.argmax(-1))
    for row in range(14):
        one = slice(row, row + 1)
        assert head_argmax(x[one], packed, inverse[one], keys[one])[1] == want[row]


def test_head_over_the_first_tokens_shares_memory(
    backend: NativeBackend, rng: torch.Generator
) -> None:
    weight = torch.randn(300, 40, generator=rng).bfloat16()
    packed, x = backend.pack(weight), torch.randn(3, 40, generator=rng)
    part = packed.first(101)
    full = backend.linear(x, packed, None)
    assert torch.equal(backend.linear(x, part, None), full[:, :101])
    assert torch.equal(head_argmax(x, part)[1], full[:, :101].argmax(-1))
    with pytest.raises(ValueError, match=r"1\.\.300"):
        packed.first(301)


def test_ties_over_all_threads_go_to_the_lowest_id(backend: NativeBackend) -> None:
    packed = backend.pack(torch.ones(400, 8))
    torch.set_num_threads(3)
    assert head_argmax(torch.ones(7, 8), packed)[1].tolist() == [0] * 7


def test_noised_argmax_samples_the_softmax(rng: torch.Generator) -> None:
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, float("-inf"), 0.5, -3.0, 1.5, 0.2])
    draws, temperature = 20_000, 0.7
    keys = random_keys(rng, draws)
    inverse = torch.full((draws,), 1 / temperature)
    index = noised_argmax(logits.expand(draws, -1).contiguous(), inverse, keys)[1]
    counts = torch.bincount(index, minlength=9).double().numpy()
    p = torch.softmax(logits.double() / temperature, 0).numpy()
    assert counts[4] == 0
    keep = p > 0
    assert stats.chisquare(counts[keep], p[keep] * draws).pvalue > 1e-5


# ---------------------------------------------------------------- building


def test_no_compiler_is_one_readable_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    with pytest.raises(NativeUnavailable, match=r"^native kernels: CXX=.* was not found$"):
        built_library()


def test_failing_compiler_is_one_readable_line_and_leaves_no_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = tmp_path / "broken"
    fake.write_text('#!/bin/sh\n[ "$1" = --version ] && echo broken 1 && exit 0\nexit 3\n')
    fake.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(fake))
    cache = tmp_path / "ssd-pipe" / "native"
    for name, modified in (("build-killed", 1.0), ("build-new", time.time())):
        (cache / name).mkdir(parents=True)
        os.utime(cache / name, (modified, modified))
    with pytest.raises(NativeUnavailable, match=r"broken failed: exit status 3$"):
        built_library()
    assert sorted(path.name for path in cache.iterdir()) == ["build-new", "build.lock"]


def test_processes_that_start_together_build_once(tmp_path: Path) -> None:
    """With a compiler that only counts its runs and copies a finished library."""
    log, fake = tmp_path / "log", tmp_path / "compiler"
    fake.write_text(
        f"""#!/bin/sh
[ "$1" = --version ] && echo fake 1 && exit 0
echo x >> {log}
while [ "$1" != -o ]; do shift; done
cp {built_library()} "$2"
"""
    )
    fake.chmod(0o755)
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "CXX": str(fake)}
    command = [
        sys.executable,
        "-c",
        "from models.native.build import built_library as b; print(b())",
    ]
    runs = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    paths = {run.communicate(timeout=120)[0].strip() for run in runs}
    assert len(paths) == 1
    assert Path(paths.pop()).exists()
    sources = len(list((Path(models.native.__file__).parent).glob("*.cpp")))
    assert len(log.read_text().split()) == sources + 1 + 2  # objects, link, two probes of flags


def test_kernels_use_torchs_thread_pool(backend: NativeBackend) -> None:
    code = (
        "from models.backends.native import NativeBackend; NativeBackend();"
        "print(len({l.split()[-1] for l in open('/proc/self/maps') if 'libgomp' in l}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "1"
