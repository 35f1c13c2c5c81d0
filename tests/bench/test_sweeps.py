"""What a sweep measures, before anything is measured."""

from __future__ import annotations

from typing import Any

import pytest

from bench.sweeps import axes as ax
from bench.sweeps import rules_study
from bench.sweeps.plan import Group, configured, plan
from ssd_pipe.config import PipelineConfig
from ssd_pipe.config_load import load
from ssd_pipe.errors import ConfigError
from ssd_pipe.params import SamplingParams

MODES = ("ar", "sd", "ssd")


def groups(*texts: str, engines: tuple[str, ...] = MODES, **settings: Any) -> list[Group]:
    config = load(None, {name.replace("__", "."): v for name, v in settings.items()})
    return plan([ax.parse(text) for text in texts], engines, config, SamplingParams(), 1)


def cells(found: list[Group]) -> list[str]:
    return [cell.key for group in found for cell in group.cells]


@pytest.mark.parametrize(
    ("text", "name", "values"),
    [
        ("k=1,2,8", "k", (1, 2, 8)),
        ("fan-out=2,[4,3,2,2,1,6]", "fan_out", (2, [4, 3, 2, 2, 1, 6])),
        ("temperature=0,0.5", "temperature", (0.0, 0.5)),
        ("rule = shared_noise, rejection", "rule", ("shared_noise", "rejection")),
        ("c=1,.5", "C", (1.0, 0.5)),
        ("speculation.k=3", "k", (3,)),
        ("speculation.taper=0.5,1.0", "speculation.taper", (0.5, 1.0)),
    ],
)
def test_axes_as_they_are_written(text: str, name: str, values: tuple[Any, ...]) -> None:
    axis = ax.parse(text)
    assert (axis.name, axis.values) == (name, values)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("k", "must look like"),
        ("k=", "must look like"),
        ("kk=1", "'kk' is none of: k, fan_out"),
        ("mode=ar,sd", "'mode' is none of"),
        ("temperature=warm", "not a number: 'warm'"),
        ("batch=0", "numbers from 1 on"),
    ],
)
def test_wrong_axes_are_named(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ax.parse(text)


def test_an_engine_is_measured_once_along_axes_that_are_none_of_its() -> None:
    found = groups("k=2,4", "fan_out=1,3", "temperature=0,1")
    assert cells(found) == [
        "ar temperature=0",
        "ar temperature=1",
        "sd k=2 temperature=0",
        "sd k=2 temperature=1",
        "sd k=4 temperature=0",
        "sd k=4 temperature=1",
        "ssd k=2 fan_out=1 temperature=0",
        "ssd k=2 fan_out=1 temperature=1",
        "ssd k=2 fan_out=3 temperature=0",
        "ssd k=2 fan_out=3 temperature=1",
        "ssd k=4 fan_out=1 temperature=0",
        "ssd k=4 fan_out=1 temperature=1",
        "ssd k=4 fan_out=3 temperature=0",
        "ssd k=4 fan_out=3 temperature=1",
    ]
    assert len(found) == 1 + 2 + 4  # temperatures share a start
    assert [g.config.speculation.k for g in found] == [5, 2, 4, 2, 2, 4, 4]


def test_greedy_rows_have_no_rule_and_shared_noise_no_c() -> None:
    found = groups("rule=shared_noise,rejection", "C=1.0,0.5", "temperature=0,1", engines=("ssd",))
    assert cells(found) == [
        "ssd temperature=0",
        "ssd rule=shared_noise temperature=1",
        "ssd rule=rejection C=1 temperature=1",
        "ssd rule=rejection C=0.5 temperature=1",
    ]
    # Greedy requests go to a pipeline that runs anyway.
    assert [len(g.cells) for g in found] == [2, 1, 1]
    assert [g.config.speculation.saguaro_c for g in found] == [1.0, 1.0, 0.5]


def test_the_study_of_rules_is_sixty_one_rows() -> None:
    study = rules_study.axes([])
    found = plan(study, MODES, PipelineConfig(), SamplingParams(), 1)
    counted = [key.split()[0] for key in cells(found)]
    assert {engine: counted.count(engine) for engine in MODES} == {"ar": 4, "sd": 7, "ssd": 50}
    assert len(found) == 1 + 2 + 15
    fewer = rules_study.axes([ax.parse("fan_out=2"), ax.parse("k=3")])
    assert [axis.name for axis in fewer] == ["rule", "C", "temperature", "fan_out", "k"]
    assert fewer[3].values == (2,)


def test_a_list_of_branches_is_taken_as_it_is() -> None:
    config = PipelineConfig()
    assert configured(config, {"fan_out": [2, 2, 2, 1, 1, 4]}, 1).speculation.allocation == "fixed"
    point = {"fan_out": [2, 2, 2, 1, 1, 4], "allocation": "geometric"}
    assert configured(config, point, 1).speculation.allocation == "geometric"
    assert configured(config, {"fan_out": 3}, 1).speculation.allocation == "confidence"
    with pytest.raises(ConfigError, match="needs k \\+ 1"):
        configured(config, {"fan_out": [1, 2]}, 1)


def test_batches_get_room_in_every_engine_alike() -> None:
    found = groups("batch=1,64", engines=("ar", "ssd"))
    assert {g.config.scheduler.max_num_seqs for g in found} == {64}
    assert {g.config.scheduler.max_batched_tokens for g in found} == {512}
    found = groups("batch=128", engines=("ssd",))
    assert found[0].config.scheduler.max_batched_tokens == 128 * 6
    with pytest.raises(ConfigError, match="transformers answers one request at a time"):
        groups("batch=1,2", engines=("ar", "transformers"))


def test_what_cannot_be_swept_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="needs the rejection rule"):
        groups("C=0.5")
    with pytest.raises(ConfigError, match="must be 1"):
        groups("k=1,99")
    with pytest.raises(ConfigError, match="names one axis twice"):
        groups("k=1", "k=2")
    assert cells(groups("C=0.5", "temperature=1", engines=("ssd",), speculation__rule="rejection"))
