"""The CUDA model path on one GPU: is it right, and how fast.

    python -m bench.gpu_model --output bench/results/gpu_model.json

Checks every kernel, whole small models and graphs; then times true shapes with random weights. A
section that fails leaves its traceback in the .log beside the output and does not stop the others.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

# Before torch starts: a 70B model leaves no room for fragments.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch

from bench.gpu_common import Report, free_memory
from bench.gpu_timing import VARIANTS

SECTIONS = ("checks", "models", "products", "attention", "sampling", "prompts")
SMALL = ("smollm2-draft-16m", "smollm2-135m", "qwen3-0.6b", "llama-3.2-1b", "llama-3.1-8b")
LARGE = ("qwen3-32b", "llama-3.1-70b")


def main() -> int:
    args = arguments()
    if not torch.cuda.is_available():
        print("no CUDA device here; this benchmark needs one", file=sys.stderr)
        return 2
    report = Report(args.output)
    report.origin("bench.gpu_model")
    torch.cuda.set_device(args.device)
    torch.manual_seed(time.time_ns() % 2**31)
    if "checks" in args.sections:
        _checks(report)
    from bench import gpu_kernels as kernels
    from bench import gpu_timing as timing
    from bench.gpu_flashinfer import time_prompts

    bandwidth = 4.3
    with report.section("bandwidth"):
        bandwidth = timing.copy_bandwidth(report)
        timing.read_bandwidth(report)
    free_memory()
    if "models" in args.sections:
        for name in args.models:
            with report.section(f"build {name}"):
                large = name in LARGE
                variants = ["default"] if large else args.variants
                timing.time_model(report, name, bandwidth, variants)
            free_memory()
    for name, run in (
        ("sampling", kernels.time_sampling),
        ("products", partial(kernels.time_products, wanted=args.cases)),
        ("attention", kernels.time_attention),
        ("prompts", time_prompts),
    ):
        if name in args.sections:
            with report.section(name), torch.inference_mode():
                run(report)
            free_memory()
    _summary(report)
    report.save()
    return 1 if report.data["failed"] else 0


def _checks(report: Report) -> None:
    from bench import gpu_checks as checks
    from bench.gpu_graph_checks import check_graphs

    for check in (
        checks.check_kernels,
        checks.check_attention,
        checks.check_models,
        check_graphs,
    ):
        with report.section(check.__name__), torch.inference_mode():
            check(report)
        free_memory()


def _summary(report: Report) -> None:
    sections = report.data["sections"]
    checks = [row for row in sections.get("check", []) if "ok" in row]
    bad = [row["name"] for row in checks if not row["ok"]]
    report.note(f"\nchecks: {len(checks) - len(bad)} of {len(checks)} within their limits")
    for name in bad:
        report.note(f"  WRONG: {name}")
    line = "{:20s} {:8s} {:>9s} {:>9s} {:>6s} {:>6s} {:>6s} {:>9s} {:>9s}"
    heads = ("shape", "variant", "ms/token", "tok/s", "share", "ver6", "ver8", "tree12", "tree24")
    report.note(line.format(*heads))
    trees = {
        (r["shape"], r["variant"], r["branches"]): f"{r['total_ms']:.3f}"
        for r in sections.get("tree", [])
    }
    for row in sections.get("decode", []):
        key = (row["shape"], row["variant"])
        report.note(
            line.format(
                *key,
                f"{row['ms']:.3f}",
                f"{row['tok_s']:.0f}",
                f"{row['bandwidth_share']:.2f}",
                f"{row['verify6']:.3f}",
                f"{row['verify8']:.3f}",
                trees.get((*key, 12), "-"),
                trees.get((*key, 24), "-"),
            )
        )
    report.note("ver: verification of 6 or 8 tokens over decoding 1; tree: ms of 5 steps in all")
    if report.data["failed"]:
        report.note(f"failed: {report.data['failed']}; tracebacks in {report.log}")


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    out = Path(os.environ.get("OUT") or "bench/results")
    parser.add_argument("--output", type=Path, default=out / "gpu_model.json")
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--sections", nargs="*", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--models", nargs="*", default=[*SMALL, *LARGE])
    parser.add_argument("--cases", nargs="*", default=[], help="of products; none = all")
    parser.add_argument(
        "--variants", nargs="*", choices=VARIANTS, default=["default", "fused", "cublas"]
    )
    return parser.parse_args(given)


if __name__ == "__main__":
    raise SystemExit(main())
