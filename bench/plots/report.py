"""One HTML page with every picture and row in it; it refers to no other file."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.loaded import Loaded
from bench.plots.style import Picture
from ssd_pipe.errors import ResourceError

COLUMNS = {
    "tok_s": ("tok/s", 1),
    "throughput": ("all tok/s", 1),
    "ttft": ("TTFT ms", 0),
    "itl_p50": ("ms/tok p50", 1),
    "itl_p99": ("p99", 1),
    "tokens_per_round": ("tok/round", 2),
    "accepted_share": ("acceptance", 2),
    "hit_rate": ("hit rate", 2),
    "hit_after_hit": ("after hit", 2),
    "hit_after_miss": ("after miss", 2),
    "draft_hidden": ("draft ms hidden", 1),
    "draft_exposed": ("exposed", 1),
    "mb_per_token": ("MB/tok", 0),
    "read_share": ("of read bandwidth", 2),
}
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem;
       color: #1a1a1a; background: #fff; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
figure { margin: 1rem 0 2rem; } img { max-width: 100%; height: auto; }
figcaption, .note { color: #555; font-size: .9rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .85rem; }
th, td { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid #ddd;
         white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
code { background: #f3f3f3; padding: .1rem .3rem; overflow-wrap: anywhere; }
"""


def write(path: Path, results: Sequence[Loaded], pictures: Sequence[Picture], folder: Path) -> None:
    """Write the page; the pictures' SVG files are in ``folder``. Raises ResourceError."""
    parts = ["<!doctype html>", '<html lang="en"><head><meta charset="utf-8">']
    parts += ['<meta name="viewport" content="width=device-width, initial-scale=1">']
    parts += [f"<title>ssd-pipe bench</title><style>{STYLE}</style></head><body>"]
    parts += ["<h1>ssd-pipe bench</h1>"]
    try:
        for picture in pictures:
            parts += _figure(picture, folder)
        for result in results:
            parts += _result(result)
        path.write_text("\n".join([*parts, "</body></html>\n"]), encoding="utf-8")
    except OSError as error:
        raise ResourceError(f"{path}: {error.strerror}") from None


def _figure(picture: Picture, folder: Path) -> list[str]:
    data = base64.b64encode((folder / f"{picture.name}.svg").read_bytes()).decode()
    title, caption = html.escape(picture.title), html.escape(picture.caption)
    return [
        f"<h2>{title}</h2>",
        f'<figure><img alt="{title}" src="data:image/svg+xml;base64,{data}">',
        f"<figcaption>{caption}</figcaption></figure>",
    ]


def _result(result: Loaded) -> list[str]:
    heading = result.heading
    command = " ".join(map(str, heading.get("command", ())))
    machine = heading.get("machine", {})
    versions = heading.get("versions", {})
    told = f"{heading.get('started', '')}, {machine.get('cpu', '')}, "
    shown = [name for name in ("torch", "commit") if name in versions]
    told += ", ".join(f"{name} {versions[name]}" for name in shown)
    head = ["row", *(name for name, _ in COLUMNS.values()), "x AR", "x SD"]
    return [
        f"<h2>{html.escape(result.path.name)}</h2>",
        f'<p class="note"><code>{html.escape(command)}</code><br>{html.escape(told)}</p>',
        '<div class="scroll"><table><thead><tr>',
        *(f"<th>{html.escape(name)}</th>" for name in head),
        "</tr></thead><tbody>",
        *(_row(entry.key, entry.row) for entry in result.entries),
        "</tbody></table></div>",
    ]


def _row(key: str, row: dict[str, Any]) -> str:
    cells = [_number(row.get(name), digits) for name, (_, digits) in COLUMNS.items()]
    speedup = row.get("speedup", {})
    cells += [_number(speedup.get(name), 2) for name in ("ar", "sd")]
    tds = "".join(f"<td>{cell}</td>" for cell in cells)
    return f"<tr><td>{html.escape(key)}</td>{tds}</tr>"


def _number(value: Any, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
