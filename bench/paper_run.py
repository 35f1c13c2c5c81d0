"""The paper's own configuration in one go: AR, SD, and SSD beside one to four draft GPUs.

    python -m bench.paper_run --gpus 8 --trace TRACE.json       # TP = 4; 4+1, 4+2, 4+4
    python -m bench.paper_run --gpus 2 --pairs qwen32b          # what two GPUs allow: 1+1

Every engine runs alone, on all batch sizes after one another; ``--resume`` goes on where a run
ended, so that it can be had in pieces. The models are of the published shapes with random weights.
Their outcomes are replayed (SYNTHETIC ACCEPTANCE), at the published values and out of traces that
were recorded on a real pair; such rows time the pipeline, not the models.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from bench import machine
from bench.copy_bandwidth import measured_apart
from bench.engines import PipelineEngine, running
from bench.paper_load import Wave, rate, run_wave
from bench.paper_plan import PAIRS, Case, arguments, cases, config_of
from bench.paper_stages import BatchStages, read_batch
from bench.results import write
from bench.tables import number, share
from models.config import ModelConfig
from ssd_pipe.errors import ResourceError, SsdPipeError
from ssd_pipe.hub import resolve

WARM_UP_TOKENS = 16


class Cell(msgspec.Struct, kw_only=True):
    """One case at one batch size.

    Attributes:
        tok_s: tokens a second of all rows together, at the client, while all rows decode.
        theorem7: share of what Theorem 7 gives with the stage times of this run.
        roofline: target weights read per second, as a share of the copy bandwidth of the target's
            GPUs as measured in this run.
        stages: see BatchStages.
    """

    case: Case
    batch: int
    tok_s: float | None
    theorem7: float | None
    roofline: float | None
    stages: BatchStages


class Content(msgspec.Struct, kw_only=True):
    """The results file. ``bandwidth``: bytes a second read plus written by a copy on one device."""

    heading: dict[str, object] = {}
    settings: dict[str, object] = {}
    synthetic: dict[str, str] = {}
    bandwidth: float = 0.0
    cells: list[Cell] = []
    failed: dict[str, str] = {}


def main(given: Sequence[str] | None = None) -> int:
    """Run what the command line says; returns 0, or 1 if a case failed."""
    args = arguments(given)
    planned = cases(args)
    content = _opened(args, given)
    content.synthetic |= {
        f"{case.pair}: {case.acceptance.name}": case.acceptance.label
        for case in planned
        if case.acceptance is not None
    }
    out = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    if not content.bandwidth:
        content.bandwidth = measured_apart(args.device)
    out.print(f"copy bandwidth of one device: {content.bandwidth * 1e-9:.0f} GB/s")
    done = {(cell.case.name, cell.batch) for cell in content.cells}
    for case in planned:
        batches = [batch for batch in args.batches if (case.name, batch) not in done]
        if batches:
            content.failed.pop(case.name, None)
            try:
                content.cells += _run(case, batches, args, content.bandwidth, out)
            except SsdPipeError as error:
                content.failed[case.name] = " ".join(str(error).split())
                out.print(f"FAILED {case.name}: {content.failed[case.name]}")
            write(args.output, content)
    for table in tables(content):
        out.print(table)
    out.print(f"results: {args.output}", soft_wrap=True)
    return 1 if content.failed else 0


def _run(
    case: Case, batches: Sequence[int], args: argparse.Namespace, bandwidth: float, out: Console
) -> list[Cell]:
    """Start the case's processes and measure each batch size. Raises SsdPipeError."""
    engine = PipelineEngine(case.name, config_of(case, args))
    vocab = ModelConfig.from_folder(resolve(PAIRS[case.pair][0])).vocab_size
    rng = random.Random(1)
    begun = time.monotonic()
    found = []
    with running([engine]):
        out.print(f"{case.name}: up in {time.monotonic() - begun:.0f} s")
        endpoint = engine.client.endpoint
        log_dir = Path(str(engine.facts.settings["log_dir"]))

        def wave(batch: int, tokens: int) -> Wave:
            prompts = [
                [rng.randrange(vocab) for _ in range(args.prompt_tokens)] for _ in range(batch)
            ]
            return run_wave(endpoint, prompts, tokens)

        for batch in batches:
            wave(batch, WARM_UP_TOKENS)
            waves = [wave(batch, args.tokens) for _ in range(args.waves)]
            stages = read_batch(log_dir, [w.window for w in waves], batch)
            tok_s, limit = rate(waves), stages.bound(batch)
            steps = (
                tok_s / (batch * stages.tokens_per_row) if tok_s and stages.tokens_per_row else None
            )
            cell = Cell(
                case=case,
                batch=batch,
                tok_s=tok_s,
                theorem7=tok_s / limit if tok_s and limit else None,
                roofline=steps and steps * engine.facts.weight_bytes / (bandwidth * case.tp),
                stages=stages,
            )
            out.print(f"  b={batch}: {number(tok_s)} tok/s, {stages.rounds} rounds")
            found.append(cell)
    return found


def tables(content: Content) -> list[Table]:
    """One table per pair and acceptance: a row per engine, K, layout and batch size."""
    made = []
    for pair in dict.fromkeys(cell.case.pair for cell in content.cells):
        mine = [cell for cell in content.cells if cell.case.pair == pair]
        for source in dict.fromkeys(cell.case.source for cell in mine if cell.case.source) or [""]:
            rows = [cell for cell in mine if cell.case.source in ("", source)]
            label = content.synthetic.get(f"{pair}: {source}", "")
            note = f" [SYNTHETIC ACCEPTANCE: {label}]" if label else ""
            made.append(_table(f"{pair}{note}", rows))
    return made


def _table(title: str, cells: Sequence[Cell]) -> Table:
    # rich would take brackets in a title for markup
    table = Table(title=title.replace("[", r"\["), title_justify="left")
    names = ("b", "engine", "GPUs", "tok/s", "x AR", "x SD", "x 1 draft", "tok/rnd", "hit")
    times = ("verify", "backup", "glue", "step", "tree ms", "Thm 7", "roofline")
    for name in (*names, *times):
        table.add_column(name, justify="left" if name == "engine" else "right", no_wrap=True)
    for batch in sorted({cell.batch for cell in cells}):
        row = [cell for cell in cells if cell.batch == batch]
        ar, sd = _best(row, "ar"), _best(row, "sd")
        for cell in row:
            case, stages = cell.case, cell.stages
            alone = [
                other
                for other in row
                if other.case.engine == "ssd" and other.case.drafts == 1 and other.case.k == case.k
            ]
            against = _best(alone, "ssd") if case.drafts > 1 else None
            table.add_row(
                str(batch),
                f"{case.engine}" + (f" K={case.k}" if case.k else ""),
                case.layout,
                number(cell.tok_s),
                number(_over(cell.tok_s, ar), 2),
                number(_over(cell.tok_s, sd), 2),
                number(_over(cell.tok_s, against), 2),
                number(stages.tokens_per_row, 2),
                share(stages.hit_rate),
                *(
                    number(value, 2)
                    for value in (
                        stages.verify_ms,
                        stages.backup_ms,
                        stages.glue_ms,
                        stages.step_ms,
                        stages.tree_ms,
                    )
                ),
                share(cell.theorem7),
                share(cell.roofline),
                end_section=cell is row[-1],
            )
    return table


def _best(cells: Sequence[Cell], engine: str) -> float | None:
    return max((c.tok_s for c in cells if c.case.engine == engine and c.tok_s), default=None)


def _over(value: float | None, base: float | None) -> float | None:
    return value / base if value and base else None


def _opened(args: argparse.Namespace, given: Sequence[str] | None) -> Content:
    """The results file as it is, if it is to be gone on with. Raises ResourceError."""
    command = ["python", "-m", "bench.paper_run", *(sys.argv[1:] if given is None else given)]
    content = Content()
    if args.resume and args.output.is_file():
        try:
            content = msgspec.json.decode(args.output.read_bytes(), type=Content)
        except msgspec.MsgspecError as error:
            raise ResourceError(f"{args.output}: not results of this program: {error}") from None
    content.heading = {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        **machine.describe(command),
        "gpus": machine.gpus() if args.device == "cuda" else [],
    }
    content.settings = {
        name: getattr(args, name) for name in ("gpus", "prompt_tokens", "tokens", "waves", "device")
    }
    return content


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except SsdPipeError as error:
        raise SystemExit(f"error: {error}") from None
