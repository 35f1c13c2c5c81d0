"""The whole pipeline on GPUs: AR, SD and SSD in real processes, target and draft on a GPU each.

    python -m bench.gpu_pipeline --pair smollm2 llama8b --output bench/results/gpu_pipeline.json

The engines of a pair run side by side and take turns, prompt by prompt. Pairs of published shapes
have random weights and replayed acceptance, and every line of theirs says so.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import msgspec

from bench import prompts
from bench.compare import Job, Sample, compare, warm_up
from bench.engines import Engine, PipelineEngine, running
from bench.gpu_common import Report
from bench.gpu_gaps import Gaps, compare_tokens
from bench.gpu_stages import Stages, bound, read_stages
from bench.paper_plan import OTHER_HIT_RATE, Acceptance, acceptances
from bench.paper_plan import PAIRS as SHAPES
from bench.rows import Row, add_comparisons, make_row
from bench.transformers_engine import TransformersEngine
from models.config import ModelConfig
from ssd_pipe.config import PipelineConfig
from ssd_pipe.config_load import load, parse_set
from ssd_pipe.errors import SsdPipeError
from ssd_pipe.hub import resolve
from ssd_pipe.params import SamplingParams
from ssd_pipe.text.tokenizer import Tokenizer

REAL = ("smollm2-135m-instruct", "smollm2-draft-16m")
PAIRS = {"smollm2": REAL, **SHAPES}
SYNTHETIC, PUBLISHED = "synthetic acceptance", "published"
PROMPT_TOKENS = 200


def main(given: Sequence[str] | None = None) -> int:
    """Run what the command line says; returns 0, or 1 if a pair or an engine failed."""
    args = arguments(given)
    report = Report(args.output)
    report.origin("bench.gpu_pipeline", given)
    for name in args.pair:
        with report.section(name):
            _run_pair(report, name, args)
    report.save()
    return 1 if report.data["failed"] else 0


def _run_pair(report: Report, pair: str, args: argparse.Namespace) -> None:
    real = PAIRS[pair] == REAL
    waves = [args.engines] if not args.one_by_one else [[e] for e in args.engines]
    for temperature in args.temperature if real else [0.0]:
        label = f"{pair} T={temperature:g}"
        if not real:
            label = f"{pair} [{SYNTHETIC}: {_replay(pair, args).label}]"
        jobs = _jobs(pair, args, temperature)
        samples: list[Sample] = []
        rows: list[Row] = []
        stages: dict[str, Stages] = {}
        for wave in waves:
            with report.section(f"{label}: {', '.join(wave)}"):
                engines = [_engine(pair, n, args) for n in wave]
                taken = _run_wave(report, pair, engines, jobs, args.repeats)
                samples += taken
                for engine in engines:
                    mine = [s for s in taken if s.engine == engine.name]
                    rows.append(make_row(mine, engine.facts.weight_bytes, None))
                    logs = Path(str(engine.facts.settings.get("log_dir", "")))
                    stages[engine.name] = read_stages(logs)
        if not rows:
            continue
        add_comparisons(rows, samples, ["ar", *[r.engine for r in rows if r.engine[:3] == "sd-"]])
        _table(report, label, rows, stages)
        if real:
            references = [e for e in args.engines if e.startswith("ar")]
            gaps = Gaps(REAL[0], args.target_device)
            with report.section(f"{label} tokens"):
                compare_tokens(report, label, samples, jobs, references, gaps)


def _run_wave(
    report: Report, pair: str, engines: list[Engine], jobs: list[Job], repeats: int
) -> list[Sample]:
    begun = time.monotonic()
    with running(engines):
        names = ", ".join(engine.name for engine in engines)
        report.note(f"{pair}: {names} up in {time.monotonic() - begun:.0f} s")
        for job in jobs:
            warm_up(engines, job)
        return compare(engines, jobs, repeats, lambda text: None)


def _engine(pair: str, name: str, args: argparse.Namespace) -> Engine:
    """ "hf" and "hf-assisted" are transformers' ``generate``; the others are ours."""
    if not name.startswith("hf"):
        return PipelineEngine(name, config_of(pair, name, args))
    target, draft = (resolve(model) for model in PAIRS[pair])
    assistant = draft if name == "hf-assisted" else None
    device, dtype = args.target_device, "bfloat16"
    return TransformersEngine(name, target, assistant, threads=2, device=device, dtype=dtype)


def config_of(pair: str, engine: str, args: argparse.Namespace) -> PipelineConfig:
    """``engine`` is "ar", "ar-pad-K", "sd-K" or "ssd[-host]-K[-B]": K draft tokens, B branches in
    all; "host" lets no round be leased."""
    target, draft = PAIRS[pair]
    mode, *numbers = engine.replace("-pad", "").replace("-host", "").split("-")
    k = int(numbers[0]) if numbers else 5
    overrides: dict[str, Any] = {
        "mode": mode,
        "target.model": target,
        "target.device": args.target_device,
        "target.tp": args.tp,
        "target.pad_steps": "-pad" in engine,
        "draft.model": draft,
        "draft.device": args.draft_device,
        "speculation.k": k,
        "speculation.draft_vocab": 0,
        "speculation.leased_rounds": "-host" not in engine,
        "speculation.adaptive": False,
        "scheduler.max_num_seqs": 1,
        "scheduler.max_model_len": args.max_model_len,
        "run.shm_dir": args.shm_dir,
        "run.log_dir": str(args.log_dir),
        "run.ready_timeout": 280.0,
        "run.beat_timeout": 60.0,
    }
    if mode == "ssd":
        budget = int(numbers[1]) if len(numbers) > 1 else 18
        overrides["speculation.fan_out"] = [
            budget // (k + 1) + (i < budget % (k + 1)) for i in range(k + 1)
        ]
    if PAIRS[pair] != REAL:
        replay = _replay(pair, args)
        overrides["speculation.synthetic_acceptance"] = replay.setting
        overrides["speculation.synthetic_hit_rate"] = replay.hit_rate
        overrides["speculation.allocation"] = "uniform"
    overrides |= dict(parse_set(text) for text in args.set)
    return load(None, overrides)


def _jobs(pair: str, args: argparse.Namespace, temperature: float) -> list[Job]:
    params = SamplingParams(max_tokens=args.tokens, temperature=temperature, ignore_eos=True)
    if PAIRS[pair] == REAL:
        tokenizer = Tokenizer.load(resolve(REAL[0]))
        texts = [(p.id, p.tokens(tokenizer)) for p in prompts.load("exactness", args.prompts)]
    else:
        rng, vocab = random.Random(1), ModelConfig.from_folder(resolve(PAIRS[pair][0])).vocab_size
        texts = [
            (f"random-{i}", [rng.randrange(vocab) for _ in range(PROMPT_TOKENS)])
            for i in range(args.prompts)
        ]
    return [
        Job(id=name, tokens=tokens, params=msgspec.structs.replace(params, seed=i))
        for i, (name, tokens) in enumerate(texts)
    ]


def _replay(pair: str, args: argparse.Namespace) -> Acceptance:
    """What outcomes of a pair of shapes are replaced by. Raises ConfigError."""
    if args.acceptance == PUBLISHED:
        return acceptances(pair, [], published=True)[0]
    try:
        float(args.acceptance)
    except ValueError:
        return acceptances(pair, [Path(args.acceptance)], published=False)[0]
    return Acceptance(
        name="given",
        setting=args.acceptance,
        hit_rate=args.hit_rate,
        label=f"{args.acceptance} a token, hit rate {args.hit_rate:g}",
    )


def _table(
    report: Report,
    label: str,
    rows: list[Row],
    stages: dict[str, Stages],
) -> None:
    columns = (
        "tok/s",
        "x AR",
        "tok/rnd",
        "accept",
        "hit",
        "verify",
        "over us",
        "hit us",
        "wait",
        "glue",
    )
    line = "{:12s}" + " {:>8s}" * (len(columns) + 3)
    report.note(f"\n{label}; times in ms, overhead in us")
    report.note(line.format("engine", *columns, "step", "theory", "same"))
    ar = next((row.tok_s for row in rows if row.engine == "ar"), None)
    for row in rows:
        stage = stages[row.engine]
        theory = bound(row, stage)
        report.note(
            line.format(
                row.engine,
                _n(row.tok_s, 1),
                _n(row.tok_s / ar if ar and row.tok_s else None, 2),
                _n(row.tokens_per_round, 2),
                _n(row.accepted_mean, 2),
                _n(row.hit_rate, 3),
                _n(stage.verify_ms, 3),
                _n(row.overhead * 1e3 if row.overhead is not None else None, 0),
                _n(stage.hit_gap_us, 1),
                _n(row.draft_exposed, 3),
                _n(stage.glue_ms, 3),
                _n(stage.step_ms, 3),
                _n(row.tok_s / theory if theory and row.tok_s else None, 3),
                _n(row.same_tokens, 2),
            )
        )
        record = msgspec.to_builtins(row)
        record |= {"pair": label, "stages": msgspec.to_builtins(stage), "theorem7_tok_s": theory}
        record["synthetic"] = SYNTHETIC in label
        report.data["sections"].setdefault("pipeline", []).append(record)
    report.note(
        "theory: share of what Theorem 7 gives with the stage times of this run; wait: for the "
        "draft, a round; same: answers equal to the first engine's"
    )


def _n(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", nargs="+", choices=PAIRS, default=["smollm2", "llama8b"])
    parser.add_argument(
        "--engines",
        nargs="+",
        default=["ar", "ar-pad-5", "sd-3", "sd-5", "ssd-5-18"],
        help="ar, ar-pad-K, sd-K, ssd[-host]-K-B: K draft tokens, B branches; hf, hf-assisted",
    )
    parser.add_argument("--one-by-one", action="store_true", help="engines after one another")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument(
        "--acceptance",
        default=PUBLISHED,
        help="for shapes: what the published throughput implies, a rate, or a recorded file",
    )
    parser.add_argument("--hit-rate", type=float, default=OTHER_HIT_RATE, help="with a rate")
    parser.add_argument("--max-model-len", type=int, default=1000)
    parser.add_argument("--target-device", default="cuda:0", help="'cuda' with --tp")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks of the target")
    parser.add_argument("--draft-device", default="cuda:1")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="any setting of our engines, repeatable",
    )
    parser.add_argument("--shm-dir", default="/dev/shm")
    parser.add_argument("--log-dir", type=Path, default=Path(gettempdir()) / "ssd-gpu-pipeline")
    parser.add_argument("--output", type=Path, default=Path("bench/results/gpu_pipeline.json"))
    return parser.parse_args(given)


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except SsdPipeError as error:
        raise SystemExit(f"error: {error}") from None
