"""Shared noise against rejection: four figures over the fan-out, a column for each temperature."""

from __future__ import annotations

from collections.abc import Sequence

from bench.loaded import Loaded
from bench.plots.series import curves, spots, values
from bench.plots.style import Picture, grid, line

FIGURES = {
    "accepted_share": "acceptance a token",
    "hit_rate": "hit rate",
    "tokens_per_round": "tokens a round",
    "tok_s": "tokens/s (decode)",
}


def pictures(results: Sequence[Loaded]) -> list[Picture]:
    """One for each sweep over rules, temperatures and fan-outs."""
    made = []
    for place, result in enumerate(results):
        found = spots(result)
        temperatures = values(found, "temperature")
        if len({s.rule for s in found}) < 2 or len(values(found, "fan_out")) < 2:
            continue
        columns = temperatures or [None]
        figure, panels = grid(len(FIGURES), len(columns), 2.7, 2.1)
        for row, (name, text) in zip(panels, FIGURES.items(), strict=True):
            for panel, temperature in zip(row, columns, strict=True):
                fixed = {} if temperature is None else {"temperature": temperature}
                for i, (rule, x, y) in enumerate(curves(found, "fan_out", name, result.k, fixed)):
                    line(panel, i, x, y, rule)
                panel.set_ylabel(text if panel is row[0] else "")
                if name in ("accepted_share", "hit_rate"):
                    panel.set_ylim(0, 1)
                if row is panels[0] and temperature is not None:
                    panel.set_title(f"T = {temperature:g}", loc="left")
                if row is panels[-1]:
                    panel.set_xlabel("fan-out F")
            top = max(panel.get_ylim()[1] for panel in row)
            for panel in row:
                panel.set_ylim(0, 1.08 * top)
        handles, labels = panels[0][-1].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4)
        made.append(
            Picture(
                name=f"rules-{place}",
                title="How proposals are judged",
                figure=figure,
                caption=f"{result.path.name}: ssd, k = {result.k}, allocation {result.allocation}; "
                "at T = 0 all rules do the same.",
            )
        )
    return made
