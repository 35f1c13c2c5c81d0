"""What ``bench.paper_run`` runs: engines, their layout on the machine, their configurations."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from tempfile import gettempdir
from typing import Any, Literal

import msgspec

from bench.published import PUBLISHED
from ssd_pipe.config import MAX_DRAFT_WORKERS, PipelineConfig
from ssd_pipe.config_load import load
from ssd_pipe.engine.acceptance_trace import read_trace
from ssd_pipe.errors import ConfigError

PAIRS = {
    "llama70b": ("shape:llama-3.1-70b", "shape:llama-3.2-1b"),
    "qwen32b": ("shape:qwen3-32b", "shape:qwen3-0.6b"),
    "llama8b": ("shape:llama-3.1-8b", "shape:llama-3.2-1b"),
    "tiny": ("shape:tiny", "shape:tiny-draft"),
}
OTHER_RATE, OTHER_HIT_RATE = 0.8, 0.86  # pairs without published figures
CHAINS = {  # draft tokens a round: SD, SSD with the target on one GPU, SSD on several
    "llama70b": (6, 12, 7),
    "qwen32b": (4, 5, 4),
    "llama8b": (4, 2, 2),
    "tiny": (3, 3, 3),
}
DRAFT_COUNTS = (1, 2, 4)
Engine = Literal["ar", "sd", "ssd"]


class Acceptance(msgspec.Struct, frozen=True, kw_only=True):
    """Where outcomes come from. ``setting``: of ``speculation.synthetic_acceptance``."""

    name: str
    setting: str
    hit_rate: float
    label: str


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One group of processes; every batch size is run on it.

    Attributes:
        k: draft tokens a round, 0 for ar.
        branches: of a row in a round, all draft workers together.
        drafts: draft workers.
        shared: the draft has no GPU of its own but the target's first one.
        acceptance: None for ar.
    """

    pair: str
    engine: Engine
    tp: int
    k: int = 0
    branches: int = 0
    drafts: int = 0
    shared: bool = False
    acceptance: Acceptance | None = None

    @property
    def layout(self) -> str:
        """GPUs of the target + those of the draft."""
        return f"{self.tp}" if self.engine == "ar" or self.shared else f"{self.tp}+{self.drafts}"

    @property
    def source(self) -> str:
        """Name of the acceptance, empty for ar."""
        return self.acceptance.name if self.acceptance else ""

    @property
    def name(self) -> str:
        """Unique in a run."""
        chain = f"-{self.k}" if self.k else ""
        tree = f"-{self.branches}" if self.branches else ""
        return " ".join(
            filter(None, (self.pair, f"{self.engine}{chain}{tree}", self.layout, self.source))
        )


def target_ranks(gpus: int) -> int:
    """Ranks of the target where the draft gets at least one of ``gpus``: a power of two."""
    ranks = 1
    while ranks * 2 < gpus:
        ranks *= 2
    return ranks


def draft_counts(gpus: int, tp: int) -> list[int]:
    """Numbers of draft workers that have a GPU each; one even if none is left."""
    return [n for n in DRAFT_COUNTS if n <= max(1, gpus - tp) and n <= MAX_DRAFT_WORKERS]


def acceptances(pair: str, traces: Sequence[Path], published: bool) -> list[Acceptance]:
    """The published values of a pair, where wanted, and each trace. Raises ConfigError."""
    found = []
    if published:
        figures = PUBLISHED.get(pair)
        rate = round(figures.acceptance, 3) if figures else OTHER_RATE
        hit_rate = figures.hit_rate if figures else OTHER_HIT_RATE
        origin = "as published throughput implies" if figures else "not published, assumed"
        found.append(
            Acceptance(
                name="published" if figures else "assumed",
                setting=str(rate),
                hit_rate=hit_rate,
                label=f"{rate:g} a token, hit rate {hit_rate:g}, {origin}",
            )
        )
    for path in traces:
        label = read_trace(path).label
        found.append(Acceptance(name=path.stem, setting=str(path), hit_rate=0.0, label=label))
    return found


def cases(args: argparse.Namespace) -> list[Case]:
    """All of a run, those of a pair together. Raises ConfigError."""
    tp = args.tp or target_ranks(args.gpus)
    counts = args.drafts or draft_counts(args.gpus, tp)
    found: list[Case] = []
    for pair in args.pairs:
        sd, single, several = CHAINS[pair]
        sources = acceptances(pair, args.trace, not args.no_published)
        if "ar" in args.engines:
            found.append(Case(pair=pair, engine="ar", tp=tp))
        for source in sources:
            if "sd" in args.engines:
                found += [
                    Case(
                        pair=pair,
                        engine="sd",
                        tp=tp,
                        k=k,
                        drafts=1,
                        shared=tp > 1 or args.gpus == 1,
                        acceptance=source,
                    )
                    for k in args.k_sd or [sd]
                ]
            if "ssd" in args.engines:
                found += [
                    Case(
                        pair=pair,
                        engine="ssd",
                        tp=tp,
                        k=k,
                        branches=args.branches or 3 * (k + 1),
                        drafts=drafts,
                        shared=args.gpus == 1,
                        acceptance=source,
                    )
                    for k in args.k_ssd or [single if tp == 1 else several]
                    for drafts in counts
                ]
    return found


def config_of(case: Case, args: argparse.Namespace) -> PipelineConfig:
    """The configuration of a case's processes. Raises ConfigError."""
    target, draft = PAIRS[case.pair]
    gpu = args.device == "cuda"
    slots, width = max(args.batches), case.k + 1
    overrides: dict[str, Any] = {
        "mode": case.engine,
        "target.model": target,
        "target.tp": case.tp,
        "target.device": args.device,
        "draft.model": draft,
        "draft.device": "cuda:0" if gpu and case.shared else args.device,
        "draft.workers": max(1, case.drafts),
        "speculation.adaptive": False,  # a row is what its label says
        "scheduler.max_num_seqs": slots,
        "scheduler.max_model_len": args.prompt_tokens + args.tokens + 64,
        "scheduler.max_batched_tokens": max(512, slots * width),
        "cache.prefix_caching": False,
        "run.shm_dir": args.shm_dir,
        "run.log_dir": str(args.log_dir),
        "run.ready_timeout": args.ready_timeout,
        "run.beat_timeout": 60.0,
    }
    if case.engine != "ar":
        overrides |= {"speculation.k": case.k, "speculation.draft_vocab": 0}
    if case.acceptance is not None:
        overrides |= {
            "speculation.synthetic_acceptance": case.acceptance.setting,
            "speculation.synthetic_hit_rate": case.acceptance.hit_rate,
            # Replayed recovery tokens know nothing of the draft's scores: cover every length alike.
            "speculation.allocation": "uniform",
        }
    if case.branches:
        each, rest = divmod(case.branches, width)
        overrides["speculation.fan_out"] = [each + (i < rest) for i in range(width)]
    if not gpu:
        overrides |= {"target.threads": 1, "draft.threads": 1}
    return load(None, overrides)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. Raises ConfigError for numbers that do not fit each other."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.paper_run",
        description="The paper's configuration: AR and SD on the target's GPUs, SSD beside 1 to 4 "
        "draft GPUs, by batch size. Shapes with random weights and SYNTHETIC ACCEPTANCE.",
    )
    add = parser.add_argument
    add("--gpus", type=int, default=8, help="of this machine [8]; with --device cpu, processes")
    add("--tp", type=int, default=0, help="target ranks [largest power of two below --gpus]")
    add("--drafts", type=int, nargs="+", help="draft workers of ssd [1 2 4, as there are GPUs]")
    add(
        "--pairs",
        nargs="+",
        choices=PAIRS,
        default=["llama70b", "qwen32b"],
        help="shapes of target and draft [llama70b qwen32b]",
    )
    modes = ["ar", "sd", "ssd"]
    add("--engines", nargs="+", choices=modes, default=modes, help="[ar sd ssd]")
    add("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="[1 2 4 8 16]")
    add("--k-sd", type=int, nargs="+", help="draft tokens a round, every one is run")
    add("--k-ssd", type=int, nargs="+", help="likewise")
    add("--branches", type=int, default=0, help="of a row, all workers together [3 (k + 1)]")
    add("--trace", type=Path, nargs="+", default=[], help="recorded acceptance to replay as well")
    add("--no-published", action="store_true", help="traces only")
    add("--prompt-tokens", type=int, default=200, help="of each request [200]")
    add("--tokens", type=int, default=256, help="of each answer [256]")
    add("--waves", type=int, default=2, help="batches of each size [2]")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="of all models [cuda]")
    add("--ready-timeout", type=float, default=280.0, help="run.ready_timeout [280]")
    add("--shm-dir", default="/dev/shm", help="run.shm_dir [/dev/shm]")
    logs = Path(gettempdir()) / "ssd-paper-run"
    add("--log-dir", type=Path, default=logs, help=f"run.log_dir [{logs}]")
    results = Path("bench/results/paper-run.json")
    add("--output", type=Path, default=results, help=f"results file (JSON) [{results}]")
    add("--resume", action="store_true", help="keep what --output has, run what it lacks")
    args = parser.parse_args(given)
    tp = args.tp or target_ranks(args.gpus)
    if args.gpus < 1 or tp > args.gpus:
        raise ConfigError("--gpus", f"{args.gpus} GPUs are too few for a target of {tp} ranks")
    if min(args.batches) < 1 or args.waves < 1 or args.tokens < 2:
        raise ConfigError("--batches", "batches and waves must be at least 1, tokens 2")
    if args.no_published and not args.trace and set(args.engines) != {"ar"}:
        raise ConfigError("--no-published", "needs a --trace to replay")
    return args
