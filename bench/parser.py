"""The options of ``ssd-pipe bench``, as argparse has them; ``options`` makes a plan of them."""

from __future__ import annotations

import argparse
from pathlib import Path

from bench.build import ENGINES, USUAL
from bench.fan_out import ALLOCATIONS, RULES, Grid
from bench.lists import integers, names, numbers
from bench.results import output_file

COMMANDS = (
    "Other commands: bench --load, bench compare A.json B.json, bench plot RESULT.json, "
    "bench gpu-table (each has --help)."
)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="ssd-pipe bench",
        description="Compare engines on the same prompts, sweep settings, measure hit rates, "
        "check exactness. Without a choice: the engines side by side.",
        epilog=COMMANDS,
    )
    _what(made)
    _size(made)
    _prompts(made)
    _engines(made)
    grid, default = made.add_argument_group("fan-out table"), Grid()
    grid.add_argument(
        "--allocations",
        type=names,
        default=default.allocations,
        metavar="LIST",
        help=f"of {','.join(ALLOCATIONS)} (all)",
    )
    grid.add_argument(
        "--rules",
        type=names,
        default=default.rules,
        metavar="LIST",
        help=f"of {','.join(RULES)} (all)",
    )
    grid.add_argument(
        "--temperatures",
        type=numbers,
        default=default.temperatures,
        metavar="LIST",
        help="of the requests (0,1)",
    )
    grid.add_argument(
        "--budgets",
        type=integers,
        default=default.budgets,
        metavar="LIST",
        help="branches of a round (12,18)",
    )
    _settings(made)
    _output(made)
    return made


def _what(made: argparse.ArgumentParser) -> None:
    what = made.add_argument_group("what to do")
    what.add_argument(
        "--frames",
        type=names,
        metavar="LIST",
        help="side by side, in frame a: one core for the target; b: all cores; own: devices and "
        "cores as configured (a,b; on a GPU own; with --quick a). A sweep takes the first",
    )
    what.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="AXIS=V,V",
        help="one row for every combination of k, fan_out (numbers, [lists]), allocation, C, "
        "temperature, batch, rule, backup, tp, or any setting; repeatable",
    )
    what.add_argument(
        "--rules-study",
        action="store_true",
        help="sweep of shared noise against rejection (C = 1 and .5) over temperature and fan-out",
    )
    what.add_argument(
        "--fan-out-table", action="store_true", help="hit rate by allocation and rule"
    )
    what.add_argument(
        "--exactness",
        type=int,
        nargs="?",
        const=0,
        metavar="N",
        help="tokens against transformers' on N prompts (50); status 1 if any differs",
    )
    what.add_argument("--quick", action="store_true", help="fewer prompts, tokens and repeats")
    what.add_argument(
        "--load", action="store_true", help="serving under load; more: bench --load --help"
    )


def _size(made: argparse.ArgumentParser) -> None:
    size = made.add_argument_group("how much")
    size.add_argument("--prompts", type=int, metavar="N", help="prompts of each set (16)")
    size.add_argument("--tokens", type=int, metavar="N", help="most tokens an answer (128)")
    size.add_argument("--repeats", type=int, metavar="N", help="passes over the prompts (3)")
    size.add_argument("--batch", type=int, default=1, metavar="N", help="requests at a time (1)")
    size.add_argument("--temperature", type=float, default=0.0, help="of the requests (0)")
    size.add_argument("--seed", type=int, default=1, help="of a set's first prompt (1)")
    size.add_argument("--ignore-eos", action="store_true", help="go on after an EOS token")


def _prompts(made: argparse.ArgumentParser) -> None:
    sets = made.add_argument_group("prompts").add_mutually_exclusive_group()
    sets.add_argument("--prompt-set", metavar="NAME", help="one set (humaneval-style)")
    sets.add_argument(
        "--datasets",
        type=names,
        metavar="LIST",
        help="sets: humaneval, gsm8k, mt-bench, alpaca, ultrafeedback, c4, truthfulqa, mbpp, "
        "sharegpt, or built-in ones; from $SSD_DATASET_DIR, a package, or the hub",
    )
    sets.add_argument(
        "--all", action="store_true", help="every published set that is to be had, at least four"
    )


def _engines(made: argparse.ArgumentParser) -> None:
    engines = made.add_argument_group("engines")
    engines.add_argument(
        "--engines",
        type=names,
        metavar="LIST",
        help=f"of {','.join(ENGINES)} (default {','.join(USUAL)}; of a sweep ar,sd,ssd)",
    )
    engines.add_argument(
        "--server",
        action="append",
        default=[],
        metavar="NAME=URL",
        help="an OpenAI-compatible server that runs, as engine NAME (its key: $OPENAI_API_KEY)",
    )
    engines.add_argument(
        "--one-at-a-time", action="store_true", help="start each engine alone, to save memory"
    )


def _settings(made: argparse.ArgumentParser) -> None:
    setting = made.add_argument_group("settings of the pipeline")
    setting.add_argument("--config", type=Path, metavar="FILE", help="TOML file")
    setting.add_argument("--target", metavar="MODEL", help="folder, hub id or built-in name")
    setting.add_argument("--draft", metavar="MODEL", help="likewise")
    setting.add_argument("--tp", type=int, metavar="N", help="tensor-parallel target processes")
    setting.add_argument("--k", type=int, metavar="K", help="draft tokens a round")
    setting.add_argument("--fan-out", metavar="N|LIST", help="branches per accepted length")
    setting.add_argument("--allocation", metavar="NAME", help="how the branches are split")
    setting.add_argument("--rule", metavar="NAME", help="how proposals are judged")
    setting.add_argument("--backup", metavar="NAME", help="what makes the chain on a miss")
    setting.add_argument("--log-dir", metavar="DIR", help="parent of the runs' log folders")
    setting.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="any setting"
    )
    setting.add_argument(
        "--host-cpus",
        type=integers,
        default=[],
        metavar="LIST",
        help="cores for frontend and scheduler in the frames (a: the second, b: any)",
    )


def _output(made: argparse.ArgumentParser) -> None:
    output = made.add_argument_group("output")
    output.add_argument(
        "--output",
        type=output_file,
        metavar="FILE",
        help="results file (JSON), or a folder for it [bench/results/]",
    )
    output.add_argument(
        "--save-trajectories", type=Path, metavar="FILE", help="every round of every answer (JSONL)"
    )
    output.add_argument(
        "--save-trace",
        type=Path,
        metavar="FILE",
        help="rounds of the last ssd engine, for --synthetic-acceptance FILE",
    )
    output.add_argument("--wandb", default="", metavar="PROJECT", help="log rows to wandb, too")
