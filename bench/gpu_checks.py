"""Correctness on the GPU: each kernel against float64, whole models against the reference backend,
graphs against the same kernels launched one by one."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from bench.gpu_common import Report, error
from models.backends.base import Backend
from models.backends.cuda import CudaBackend, CudaOptions
from models.backends.reference import ReferenceBackend
from models.batch import ForwardBatch
from models.config import ModelConfig
from models.cuda import noise as cuda_noise
from models.cuda.norms import silu_mul
from models.cuda.one_row import one_row_linear
from models.cuda.products import few_rows_linear
from models.loader import build_transformer
from models.parallel import TensorParallel
from models.sequence_batch import build_batch
from models.shapes import shape
from models.sharding import Span
from models.transformer import Transformer
from ssd_pipe.sampling import noise

LIMIT = {torch.float32: 2e-5, torch.bfloat16: 1e-2}
MODEL_LIMIT = {torch.float32: 2e-4, torch.bfloat16: 4e-2}
BLOCK = 16
DTYPES = (torch.float32, torch.bfloat16)


class WideWeights:
    """Random weights large enough that attention is far from uniform, the same on any device."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        self.dtype, self.seed = dtype, seed

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: Span | None = None,
        columns: Span | None = None,
    ) -> torch.Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))
        tensor = torch.randn(shape, generator=generator) * 0.12
        if name.endswith("norm.weight"):
            tensor = 1.0 + tensor
        return tensor.to(self.dtype)


@contextmanager
def poisoned() -> Iterator[None]:
    """Fresh tensors start as NaN, so that an output left unwritten shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def check(report: Report, name: str, value: float, limit: float) -> None:
    """Record an error; raise once all the section's are known is the caller's."""
    good = value <= limit
    report.add("check", name=name, error=value, limit=limit, ok=good)
    if not good:
        report.data["failed"].append(name)


def check_kernels(report: Report, device: str = "cuda") -> None:
    """Norms, gate, rotation, products and noise on fresh random inputs."""
    generator = torch.Generator(device).manual_seed(int.from_bytes(np.random.bytes(4), "little"))

    def randn(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(size, device=device, generator=generator).to(dtype)

    for dtype in DTYPES:
        tag, limit = str(dtype).removeprefix("torch."), LIMIT[dtype]
        backend = CudaBackend(device, dtype)
        for rows, width in ((1, 576), (8, 4096), (300, 8192)):
            x, res, w = (
                randn(rows, width, dtype=dtype),
                randn(rows, width, dtype=dtype),
                randn(width),
            )
            want = functional.rms_norm(x.double(), (width,), w.double(), 1e-5)
            with poisoned():
                got = backend.rms_norm(x, w, 1e-5)
                both, total = backend.add_rms_norm(x, res, w, 1e-5)
                gate = silu_mul(x)
            check(report, f"rms_norm {tag} {rows}x{width}", error(got, want), limit)
            summed = (x + res).double()
            want = functional.rms_norm(summed, (width,), w.double(), 1e-5)
            check(report, f"add_rms_norm {tag} {rows}x{width}", error(both, want), limit)
            check(report, f"residual sum {tag} {rows}x{width}", error(total, summed), limit)
            a, b = x.double().chunk(2, 1)
            check(
                report, f"silu_mul {tag} {rows}x{width}", error(gate, functional.silu(a) * b), limit
            )
        for rows, k, n in (
            (1, 576, 960),
            (6, 576, 576),
            (24, 2048, 512),
            (8, 2048, 16384),
            (12, 8192, 2048),
            (17, 2048, 3072),
            (64, 256, 1792),
            (1, 8192, 512),
        ):
            x, w, norm = randn(rows, k, dtype=dtype), randn(n, k, dtype=dtype), 1 + randn(k) * 0.2
            res, bias = randn(rows, n, dtype=dtype), randn(n, dtype=dtype)
            size = f"{tag} {rows}x{k}x{n}"
            product = x.double() @ w.double().T
            gate, up = product.chunk(2, 1)
            with poisoned():
                summed = few_rows_linear(x, w, bias, residual=res)
                gated = few_rows_linear(x, w, gated=True)
            want = product + bias.double() + res.double()
            check(report, f"product + bias + residual {size}", error(summed, want), limit)
            check(report, f"product + gate {size}", error(gated, functional.silu(gate) * up), limit)
            if rows > 1 and dtype == torch.bfloat16:
                alone = torch.cat([few_rows_linear(x[i : i + 1], w) for i in range(min(rows, 32))])
                differing = int((alone != few_rows_linear(x, w)[:32]).sum())
                check(report, f"product of one row or many {size}", float(differing), 0.0)
            if rows > 1:
                continue
            normed = functional.rms_norm(x.double(), (k,), norm.double(), 1e-5) @ w.double().T
            gate, up = normed.chunk(2, 1)
            with poisoned():
                summed = one_row_linear(x, w, bias, residual=res)
                got = one_row_linear(x, w, norm=norm, eps=1e-5)
                gated = one_row_linear(x, w, norm=norm, eps=1e-5, gated=True)
            check(report, f"one row: bias + residual {size}", error(summed, want), limit)
            check(report, f"one row: norm {size}", error(got, normed), limit)
            check(
                report,
                f"one row: norm + gate {size}",
                error(gated, functional.silu(gate) * up),
                limit,
            )
    check_noise(report, device)


def check_noise(report: Report, device: str) -> None:
    """Noise and choices against the samplers' torch formula."""
    rows, vocab = 24, 128256
    keys = noise.keys_to_tensor(noise.row_keys(np.arange(rows), [7], noise.SHARED), device)
    logits = torch.randn((rows, vocab), device=device) * 4
    factors = torch.linspace(0.6, 3.0, rows, device=device)
    factors[::3] = 0
    want = logits * factors[:, None] + noise.gumbel(keys, vocab)
    want[::3] = logits[::3]
    with poisoned():
        scores = cuda_noise.noised_scores(logits, keys, factors)
        chosen = cuda_noise.choose(logits, keys, factors)
    check(report, "noised scores, largest difference", float((scores - want).abs().max()), 3e-5)
    wrong = float((chosen != want.argmax(1)).float().mean())
    check(report, "choices that differ", wrong, 0.0)
    tied = torch.zeros((2, vocab), device=device)
    tied[:, [5000, 90000]] = 1.0
    got = cuda_noise.choose(tied, keys[:2], torch.zeros(2, device=device))
    check(report, "ties go to the lowest id", float((got != 5000).sum()), 0.0)


def check_attention(report: Report, device: str = "cuda") -> None:
    """Branches, interleaved sequences, padding and long contexts, against float64 on the CPU."""
    rng = np.random.default_rng()
    cases = ((32, 8, 64), (9, 3, 64), (32, 8, 128), (64, 8, 128), (16, 8, 128))
    for dtype in DTYPES:
        # float32's kernels take seconds each to compile.
        for heads, kv_heads, dim in cases if dtype == torch.bfloat16 else cases[:3]:
            for split in (64, 256, 0):
                options = CudaOptions(split=split or 64, split_tokens=256 if split else 0)
                blocks, tokens, rows = 600, 40, 3
                tables = rng.permutation(blocks)[: rows * 130].reshape(rows, 130).astype(np.int32)
                context = rng.integers(0, 130 * BLOCK, tokens).astype(np.int32)
                lens = rng.integers(0, 6, tokens).astype(np.int32)
                context[:2], lens[:2], context[2] = 0, 0, 130 * BLOCK
                arrays = (
                    np.zeros(tokens, np.int64),
                    np.zeros(tokens, np.int64),
                    np.zeros(tokens, np.int64),
                    rng.integers(0, rows, tokens).astype(np.int32),
                    tables,
                    context,
                    np.arange(tokens),
                    rng.integers(0, blocks * BLOCK, (tokens, 5)).astype(np.int32),
                    lens,
                )
                batch = ForwardBatch(*(torch.from_numpy(a) for a in arrays))
                on_device = ForwardBatch(*(torch.from_numpy(a).to(device) for a in arrays))
                kv_shape = (blocks, BLOCK, kv_heads, dim)
                keys, values = torch.randn(kv_shape).to(dtype), torch.randn(kv_shape).to(dtype)
                q = torch.randn(tokens, heads, dim).to(dtype)
                reference = ReferenceBackend("cpu", torch.float64)
                some = batch.seqs.new_ones(tokens, dtype=torch.bool)
                some[:2] = False
                want = reference.attention(
                    q[some].double(), keys.double(), values.double(), _rows(batch, some), dim**-0.5
                )
                backend = CudaBackend(device, dtype, options)
                with poisoned():
                    got = backend.attention(
                        q.to(device), keys.to(device), values.to(device), on_device, dim**-0.5
                    ).cpu()
                name = f"attention {str(dtype)[6:]} {heads}/{kv_heads}x{dim} split {split}"
                value = error(got[some], want) + float(got[:2].abs().sum())
                check(report, name, value, LIMIT[dtype])


def _rows(batch: ForwardBatch, keep: torch.Tensor) -> ForwardBatch:
    assert batch.suffix_slots is not None
    assert batch.suffix_lens is not None
    return replace(
        batch,
        tokens=batch.tokens[keep],
        positions=batch.positions[keep],
        slots=batch.slots[keep],
        seqs=batch.seqs[keep],
        context_lens=batch.context_lens[keep],
        suffix_slots=batch.suffix_slots[keep],
        suffix_lens=batch.suffix_lens[keep],
    )


def small_shapes() -> dict[str, ModelConfig]:
    """Three layers of each family, of real widths' proportions."""
    changes: dict[str, Any] = {
        "num_layers": 3,
        "vocab_size": 1000,
        "hidden_size": 256,
        "intermediate_size": 512,
    }
    return {
        "llama": replace(
            shape("llama-3.1-8b"), **changes, num_heads=8, num_kv_heads=2, head_dim=64
        ),
        "qwen3": replace(shape("qwen3-0.6b"), **changes, num_heads=4, num_kv_heads=2),
    }


def build_pair(
    config: ModelConfig, dtype: torch.dtype, device: str, options: CudaOptions | None = None
) -> tuple[Transformer, Transformer]:
    """(on the CUDA backend, on the reference in float32 on the CPU), of the same weights."""
    backends: tuple[Backend, Backend] = (
        CudaBackend(device, dtype, options),
        ReferenceBackend("cpu", torch.float32),
    )
    ours, reference = (
        build_transformer(config, WideWeights(dtype, 1), backend, TensorParallel(), 1024)
        for backend in backends
    )
    return ours, reference


def check_models(report: Report, device: str = "cuda") -> None:
    """Prefill, decoding and branches of whole small models against the reference."""
    modes = {
        "default": CudaOptions(split=64),
        "fused": CudaOptions(split=64, fused_width=8192),
        "cublas": CudaOptions(split=64, few_tokens=0),
        "unsplit": CudaOptions(split_tokens=0, few_tokens=0),
    }
    for family, config in small_shapes().items():
        for dtype in DTYPES:
            for mode, options in modes.items():
                models = build_pair(config, dtype, device, options)
                kvs = [m.make_kv(64, BLOCK) for m in models]
                worst: dict[str, float] = {}
                for stage, rows in _stages(config.vocab_size):
                    got, want = (
                        m.logits(m.forward(_on(rows, m.backend.device), kv))
                        for m, kv in zip(models, kvs, strict=True)
                    )
                    assert got is not None
                    assert want is not None
                    worst[stage] = error(got.cpu(), want)
                name = f"model {family} {str(dtype)[6:]} {mode}"
                report.add("check", name=f"{name} by stage", **worst)
                check(report, name, max(worst.values()), MODEL_LIMIT[dtype])


def _stages(vocab: int) -> list[tuple[str, ForwardBatch]]:
    rng = np.random.default_rng(2)
    order = rng.permutation(64)
    tables = [order[:20].tolist(), order[20:40].tolist()]
    texts = [rng.integers(0, vocab, 300).tolist() for _ in range(2)]
    stages = [
        (
            "prefill",
            build_batch(
                [(tables[0], 0, texts[0][:290], 280), (tables[1], 0, texts[1][:77], 70)], BLOCK
            ),
        ),
        ("decode", build_batch([(tables[0], 290, texts[0][290:291], 0)], BLOCK)),
        (
            "verify",
            build_batch(
                [(tables[i], s, texts[i][s : s + 6], 0) for i, s in ((0, 291), (1, 77))], BLOCK
            ),
        ),
    ]
    slots = torch.tensor([int(order[40 + i]) * BLOCK for i in range(12)])
    context = torch.tensor([290 + i % 7 for i in range(8)] + [80, 81, 79, 80])
    for step in range(3):
        branch = ForwardBatch(
            tokens=torch.from_numpy(rng.integers(0, vocab, 12)),
            positions=context + step,
            slots=slots + step,
            seqs=torch.tensor([0] * 8 + [1] * 4, dtype=torch.int32),
            block_tables=torch.tensor(tables, dtype=torch.int32),
            context_lens=context.int(),
            logit_index=torch.arange(12),
            suffix_slots=(slots[:, None] + torch.arange(5)).int(),
            suffix_lens=torch.full((12,), step + 1, dtype=torch.int32),
        )
        stages.append((f"branch{step}", branch))
    return stages


def _on(batch: ForwardBatch, device: torch.device) -> ForwardBatch:
    names = [f for f in batch.__slots__ if f not in ("plan", "layout")]
    tensors: dict[str, Any] = {n: getattr(batch, n) for n in names}
    moved: dict[str, Any] = {n: t if t is None else t.to(device) for n, t in tensors.items()}
    return ForwardBatch(**moved, layout=batch.layout)
