"""Miss rate against fan-out on logarithmic axes, with the power law and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.loaded import Loaded
from bench.plots import power_law
from bench.plots.series import Spot, curves, number, spots, values
from bench.plots.style import MARKERS, Picture, colour, grid

TICKS = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0)
SHOWN_FAN_OUT = 3  # branches per accepted length of the allocation in the caption


def pictures(results: Sequence[Loaded]) -> list[Picture]:
    """One for each sweep over three fan-outs or more."""
    made = []
    for place, result in enumerate(results):
        found = spots(result)
        if len(values(found, "fan_out")) >= power_law.LEAST_POINTS:
            made.append(_picture(result, found, place))
    return made


def _picture(result: Loaded, found: Sequence[Spot], place: int) -> Picture:
    columns = values(found, "temperature") or [None]
    figure, [panels] = grid(1, len(columns), 3.3, 3.2)
    told = []
    seen = [1 - s.row["hit_rate"] for s in found if s.row.get("hit_rate") is not None]
    low, high = 0.9 * min(seen), min(1.0, 1.1 * max(seen))
    for panel, temperature in zip(panels, columns, strict=True):
        fixed = {} if temperature is None else {"temperature": temperature}
        for i, (rule, x, hits) in enumerate(curves(found, "fan_out", "hit_rate", result.k, fixed)):
            misses = [1 - hit for hit in hits]
            panel.plot(x, misses, MARKERS[i], color=colour(i), markersize=5)
            law = power_law.fit(x, misses)
            label = rule
            if law is not None:
                ends = [min(x), max(x)]
                panel.plot(ends, [law.at(f) for f in ends], color=colour(i), linewidth=1.2)
                label = f"{rule}: r = {law.exponent:.2f} ± {law.error:.2f}"
                told.append(_told(result, found, rule, fixed, law))
            panel.plot([], [], MARKERS[i], color=colour(i), label=label)
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_xlabel("fan-out F")
        ticks = sorted({number(v, result.k) for v in values(found, "fan_out")})
        panel.set_xticks(ticks, [f"{t:g}" for t in ticks])
        panel.set_ylim(max(low, TICKS[0]), high)
        shown = [t for t in TICKS if low <= t <= high]
        panel.set_yticks(shown, [f"{t:g}" for t in shown])
        panel.minorticks_off()
        panel.legend(fontsize=7)
        if temperature is not None:
            panel.set_title(f"T = {temperature:g}", loc="left")
    panels[0].set_ylabel("miss rate")
    return Picture(
        name=f"misses-{place}",
        title="Miss rate against fan-out, with the power law",
        figure=figure,
        caption=f"{result.path.name}, allocation {result.allocation}. Geometric fan-out "
        f"(Theorem 12) for {SHOWN_FAN_OUT} branches a length: " + "; ".join(told) + ".",
    )


def _told(
    result: Loaded, found: Sequence[Spot], rule: str, fixed: dict[str, Any], law: power_law.Fit
) -> str:
    shares = [
        spot.row["accepted_share"]
        for spot in found
        if spot.rule == rule
        and spot.row.get("accepted_share") is not None
        and all(spot.point.get(name) == value for name, value in fixed.items())
    ]
    acceptance = sum(shares) / len(shares) if shares else 0.0
    counts = power_law.implied(law, acceptance, result.k, SHOWN_FAN_OUT * (result.k + 1))
    where = "".join(f", T = {value:g}" for value in fixed.values())
    return f"{rule}{where}, a = {acceptance:.2f}, r = {law.exponent:.2f}: {counts}"
