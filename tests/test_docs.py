"""What the documentation says of names, options, fields and files, held against the code."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest
from typer.main import get_group

from bench import parser
from bench.load import options as load_options
from ipc.messages.sampling import SamplingParams
from procs.http import metrics, schemas
from ssd_pipe.cli.main import app
from ssd_pipe.cli.options import SETTINGS
from ssd_pipe.config_load import setting_names

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / name for name in ("README.md", "procs/README.md", "bench/README.md")]
RESULTS = ROOT / "bench/results"
PAGES.append(RESULTS / "README.md")
README = PAGES[0].read_text()
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
PATH = re.compile(r"`((?:ssd_pipe|procs|ipc|models|bench|tests)/[\w./-]+)`")


def anchors(page: Path) -> set[str]:
    """The headings of a page, as GitHub names them in links."""
    titles = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    lost = []
    for link in LINK.findall(text):
        place, _, anchor = link.partition("#")
        if "://" in place:
            continue
        target = (page.parent / place).resolve() if place else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            lost.append(link)
    lost += [path for path in PATH.findall(text) if not (ROOT / path).exists()]
    assert not lost


def test_every_setting_and_flag_is_in_the_table_of_options() -> None:
    rows = [line for line in README.splitlines() if line.startswith("| `")]
    named: dict[str, str] = {}  # setting -> its row
    for row in rows:
        section = ""
        for name in re.findall(r"`([\w.]+)`", row.split("|")[1]):
            before, _, key = name.rpartition(".")
            section = before or section
            named[f"{section}.{key}" if section else key] = row
    assert [name for name in setting_names() if name not in named] == []
    flags = [flag for s in SETTINGS for flag in s.flag.split("/") if f"`{flag}`" not in README]
    assert flags == []


def test_every_metric_field_and_refused_field_is_named() -> None:
    ours = [*metrics.GAUGES, *metrics.COUNTERS, *metrics.LABELLED, *metrics.BY_LENGTH]
    named = [name for name in ours if name.startswith("ssd_pipe:")]
    fields = [*SamplingParams.__struct_fields__, *schemas.FORMAT_NAMES]
    fields += schemas.ChatRequest.unsupported + schemas.CompletionRequest.unsupported
    assert [name for name in (*named, *fields) if f"`{name}" not in README] == []


def test_every_results_file_is_explained() -> None:
    text = (RESULTS / "README.md").read_text()
    assert [p.name for p in sorted(RESULTS.glob("*.json")) if p.name not in text] == []
    told = re.findall(r"`(20[\w-]+\.json)`", "".join(page.read_text() for page in PAGES))
    assert [name for name in told if not (RESULTS / name).exists()] == []


def test_every_option_has_a_help_text() -> None:
    silent = [
        f"{name} {option.opts[0]}"
        for name, command in get_group(app).commands.items()
        for option in command.params
        if not getattr(option, "help", "")
    ]
    assert silent == []


@pytest.mark.parametrize("made", [parser.parser(), load_options._parser()], ids=lambda p: p.prog)
def test_every_option_of_the_benchmark_has_a_help_text(made: argparse.ArgumentParser) -> None:
    assert [action.option_strings for action in made._actions if not action.help] == []
