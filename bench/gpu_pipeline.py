"""The whole pipeline on GPUs: AR, SD and SSD in real processes, target and draft on a GPU each.

    python -m bench.gpu_pipeline --pair smollm2 llama8b --output bench/results/gpu_pipeline.json

The engines of a pair run side by side and take turns, prompt by prompt. Pairs of published shapes
have random weights and replayed acceptance, and every line of theirs says so.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import msgspec

from bench import prompts
from bench.compare import Job, Sample, compare, warm_up
from bench.engines import Engine, PipelineEngine, running
from bench.gpu_common import Report
from bench.gpu_stages import Stages, bound, read_stages
from bench.rows import Row, add_comparisons, make_row
from bench.transformers_engine import TransformersEngine
from ssd_pipe.config import PipelineConfig
from ssd_pipe.config_load import load
from ssd_pipe.errors import SsdPipeError
from ssd_pipe.hub import resolve
from ssd_pipe.params import SamplingParams
from ssd_pipe.text.tokenizer import Tokenizer

REAL = ("smollm2-135m-instruct", "smollm2-draft-16m")
PAIRS = {
    "smollm2": REAL,
    "llama8b": ("shape:llama-3.1-8b", "shape:llama-3.2-1b"),
    "llama70b": ("shape:llama-3.1-70b", "shape:llama-3.2-1b"),
    "qwen32b": ("shape:qwen3-32b", "shape:qwen3-0.6b"),
}
SYNTHETIC = "synthetic acceptance"
PROMPT_TOKENS = 200


def main() -> int:
    args = _arguments()
    report = Report(args.output)
    _environment(report)
    for name in args.pair:
        with report.section(name):
            _run_pair(report, name, args)
    report.save()
    return 1 if report.data["failed"] else 0


def _run_pair(report: Report, pair: str, args: argparse.Namespace) -> None:
    real = PAIRS[pair] == REAL
    waves = [args.engines] if not args.one_by_one else [[e] for e in args.engines]
    for temperature in args.temperature if real else [0.0]:
        jobs = _jobs(pair, args, temperature)
        samples: list[Sample] = []
        rows: list[Row] = []
        stages: dict[str, Stages] = {}
        for wave in waves:
            engines = [_engine(pair, n, args) for n in wave]
            begun = time.monotonic()
            with running(engines):
                report.note(f"{pair}: {', '.join(wave)} up in {time.monotonic() - begun:.0f} s")
                for job in jobs:
                    warm_up(engines, job)
                taken = compare(engines, jobs, args.repeats, lambda text: None)
            samples += taken
            for engine in engines:
                mine = [s for s in taken if s.engine == engine.name]
                rows.append(make_row(mine, engine.facts.weight_bytes, None))
                logs = Path(str(engine.facts.settings.get("log_dir", "")))
                stages[engine.name] = read_stages(logs)
        add_comparisons(rows, samples, ["ar", *[r.engine for r in rows if r.engine[:3] == "sd-"]])
        label = f"{pair} T={temperature:g}" if real else f"{pair} [{SYNTHETIC} {_replay(args)}]"
        _table(report, label, rows, stages)
        if real:
            references = [e for e in args.engines if e.startswith("ar")]
            with report.section(f"{label} tokens"):
                _compare_tokens(
                    report, label, samples, jobs, references, args.target_device, temperature
                )


def _engine(pair: str, name: str, args: argparse.Namespace) -> Engine:
    """ "hf" and "hf-assisted" are transformers' ``generate``; the others are ours."""
    if not name.startswith("hf"):
        return PipelineEngine(name, _config(pair, name, args))
    target, draft = (resolve(model) for model in PAIRS[pair])
    assistant = draft if name == "hf-assisted" else None
    device, dtype = args.target_device, "bfloat16"
    return TransformersEngine(name, target, assistant, threads=2, device=device, dtype=dtype)


def _config(pair: str, engine: str, args: argparse.Namespace) -> PipelineConfig:
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
        overrides["speculation.synthetic_acceptance"] = args.acceptance
        overrides["speculation.synthetic_hit_rate"] = args.hit_rate
        overrides["speculation.allocation"] = "uniform"
    return load(None, overrides)


def _jobs(pair: str, args: argparse.Namespace, temperature: float) -> list[Job]:
    params = SamplingParams(max_tokens=args.tokens, temperature=temperature, ignore_eos=True)
    if PAIRS[pair] == REAL:
        tokenizer = Tokenizer.load(resolve(REAL[0]))
        texts = [(p.id, p.tokens(tokenizer)) for p in prompts.load("exactness", args.prompts)]
    else:
        rng = random.Random(1)
        texts = [
            (f"random-{i}", [rng.randrange(100000) for _ in range(PROMPT_TOKENS)])
            for i in range(args.prompts)
        ]
    return [
        Job(id=name, tokens=tokens, params=msgspec.structs.replace(params, seed=i))
        for i, (name, tokens) in enumerate(texts)
    ]


def _replay(args: argparse.Namespace) -> str:
    return f"{args.acceptance} a token, hit rate {args.hit_rate:g}"


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


def _compare_tokens(
    report: Report,
    label: str,
    samples: list[Sample],
    jobs: list[Job],
    references: list[str],
    device: str,
    temperature: float,
) -> None:
    """Where engines part from AR, and how close the target's two best scores are there."""
    from bench.gpu_gaps import Gaps

    gaps = Gaps(REAL[0], device)
    asked = {job.id: job for job in jobs}
    names = list(dict.fromkeys(s.engine for s in samples))
    for reference in references:
        wanted = {s.key: s.answer.tokens for s in samples if s.engine == reference}
        for engine in names:
            if engine == reference or (engine.startswith("hf") and temperature > 0):
                continue  # transformers has noise of its own
            answers = [s for s in samples if s.engine == engine and s.key in wanted]
            found = []
            for sample in answers:
                ours, theirs = wanted[sample.key], sample.answer.tokens
                pairs = enumerate(zip(ours, theirs, strict=False))
                at = next((i for i, (a, b) in pairs if a != b), None)
                if at is not None:
                    job = asked[sample.prompt]
                    text = job.tokens + ours[:at]
                    found.append(gaps.between(text, ours[at], theirs[at], job.params))
            report.add(
                "tokens",
                pair=label,
                reference=reference,
                engine=engine,
                answers=len(answers),
                equal=len(answers) - len(found),
                gaps=[round(gap, 4) for gap in sorted(found)],
            )


def _environment(report: Report) -> None:
    import torch
    import triton

    report.data["environment"] = {
        "command": " ".join(sys.argv),
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
    }
    report.note(str(report.data["environment"]))


def _arguments() -> argparse.Namespace:
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
    parser.add_argument("--acceptance", default="0.8", help="a rate or a file, for shapes")
    parser.add_argument("--hit-rate", type=float, default=0.86, help="likewise, with a rate")
    parser.add_argument("--max-model-len", type=int, default=1000)
    parser.add_argument("--target-device", default="cuda:0", help="'cuda' with --tp")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks of the target")
    parser.add_argument("--draft-device", default="cuda:1")
    parser.add_argument("--log-dir", type=Path, default=Path(gettempdir()) / "ssd-gpu-pipeline")
    parser.add_argument("--output", type=Path, default=Path("bench/results/gpu_pipeline.json"))
    return parser.parse_args()


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except SsdPipeError as error:
        raise SystemExit(f"error: {error}") from None
