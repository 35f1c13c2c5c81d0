"""Pictures of results: files, what is in them, and the fit of the power law."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from bench.__main__ import main
from bench.loaded import read
from bench.plots import power_law
from bench.plots.series import curves, spots

PNG = b"\x89PNG\r\n\x1a\n"
FAN_OUTS, TEMPERATURES = (1, 2, 4, 8), (0.0, 1.0)


def row(engine: str, **figures: Any) -> dict[str, Any]:
    return {"engine": engine, "set": "s", "tok_s": 50.0, "speedup": {}, **figures}


def swept() -> list[dict[str, Any]]:
    rows = []
    for fan_out in FAN_OUTS:
        for temperature in TEMPERATURES:
            rules = ("shared_noise", "rejection") if temperature else ("",)
            for rule in rules:
                point: dict[str, Any] = {"temperature": temperature, "fan_out": fan_out}
                if rule:
                    point |= {"rule": rule} | ({"C": 1.0} if rule == "rejection" else {})
                figures = {"hit_rate": 1 - 0.6 * fan_out**-0.5, "accepted_share": 0.7}
                rows.append(row("ssd", point=point, tokens_per_round=2.5, **figures))
    return rows


@pytest.fixture
def study(tmp_path: Path) -> Path:
    plan = {"config": {"speculation": {"k": 5, "rule": "shared_noise", "allocation": "uniform"}}}
    content = {"version": 1, "plan": plan, "command": ["ssd-pipe", "<bench>"]}
    path = tmp_path / "study.json"
    path.write_text(json.dumps({**content, "sweep": {"rows": swept(), "samples": []}}))
    return path


@pytest.fixture
def frames(tmp_path: Path) -> Path:
    rows = [row(e, set=s) for s in ("gsm8k", "c4", "all") for e in ("ar", "ssd")]
    frame = {"frame": "a", "rows": rows[4:], "set_rows": {"gsm8k": rows[:2], "c4": rows[2:4]}}
    batch = [
        row("ssd", point={"batch": b}, throughput=50.0 * b**0.7, itl_p50=10.0 * b**0.3)
        for b in (1, 2, 4)
    ]
    path = tmp_path / "frames.json"
    sweep = {"rows": batch, "samples": []}
    path.write_text(json.dumps({"frames": [{**frame, "samples": []}], "sweep": sweep}))
    return path


def test_every_kind_of_picture_and_a_page_that_stands_alone(
    study: Path, frames: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "pictures"
    assert main(["plot", str(study), str(frames), "--out", str(out)]) == 0
    names = {path.stem for path in out.glob("*.png")}
    assert names == {
        "speed-1-frame-a",
        "rules-0",
        "acceptance-0-temperature",
        "acceptance-0-fan_out",
        "misses-0",
        "batch-1",
    }
    assert {path.stem for path in out.glob("*.svg")} == names
    assert all((out / f"{name}.png").read_bytes().startswith(PNG) for name in names)
    text = {name: "".join(ET.parse(out / f"{name}.svg").getroot().itertext()) for name in names}
    assert "gsm8k" in text["speed-1-frame-a"]
    assert "r = 0.50" in text["misses-0"]
    assert "rejection, C = 1" in text["rules-0"]
    page = (out / "report.html").read_text()
    assert page.count("data:image/svg+xml;base64,") == len(names)
    assert "&lt;bench&gt;" in page
    assert not re.findall(r'(?:src|href)="(?!data:)', page)
    assert str(out / "report.html") in capsys.readouterr().out


def test_greedy_rows_belong_to_every_rule(study: Path) -> None:
    found = spots(read(study))
    rules = {"shared noise", "rejection, C = 1"}
    drawn = list(curves(found, "fan_out", "hit_rate", 5, {"temperature": 0.0}))
    assert {rule for rule, _, _ in drawn} == rules
    assert all(x == list(FAN_OUTS) for _, x, _ in drawn)
    by_temperature = list(curves(found, "temperature", "hit_rate", 5, {"fan_out": 2}))
    assert all(len(x) == 2 for _, x, _ in by_temperature)


def test_the_power_law_comes_out_as_it_went_in() -> None:
    law = power_law.fit([1, 2, 4, 8], [0.6 * f**-0.7 for f in (1, 2, 4, 8)])
    assert law is not None
    assert law.exponent == pytest.approx(0.7)
    assert law.scale == pytest.approx(0.6)
    assert law.error == pytest.approx(0.0, abs=1e-6)
    assert law.at(3) == pytest.approx(0.6 * 3**-0.7)
    assert power_law.fit([1, 2], [0.5, 0.4]) is None
    assert power_law.fit([1, 2, 4], [0.5, 0.4, 0.0]) is None


def test_the_implied_fan_out_is_theorem_12() -> None:
    law = power_law.fit([1, 2, 4], [0.8, 0.4, 0.2])
    assert law is not None
    counts = power_law.implied(law, 0.5, 3, 12)
    assert counts is not None
    assert sum(counts) == 12
    # r = 1: each length has sqrt(1/2) of the one before, the last one (1 - a)^(-1/2) more:
    # 1, .71, .5, .5, scaled to 4.43, 3.13, 2.22, 2.22.
    assert counts == [5, 3, 2, 2]
    rising = power_law.fit([1, 2, 4], [0.2, 0.3, 0.4])
    assert rising is not None
    assert power_law.implied(rising, 0.5, 3, 12) is None
