"""Which targets launch steps before their input is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from models.registry import load_model
from procs import target
from procs.target import launches_ahead
from ssd_pipe.config import PipelineConfig, config_from_mapping
from tests.models.tiny import make_tiny


def on(target_device: str, draft_device: str, mode: str = "ssd") -> PipelineConfig:
    return config_from_mapping(
        {"mode": mode, "target": {"device": target_device}, "draft": {"device": draft_device}}
    )


def test_a_target_waits_on_a_gpu_of_its_own_only(tmp_path: Path) -> None:
    model = load_model(make_tiny(tmp_path))
    assert launches_ahead(on("cuda:0", "cuda:1"), model)
    assert launches_ahead(on("cuda:0", "cpu"), model)
    assert launches_ahead(on("cuda:0", "cuda:0", "ar"), model)
    assert not launches_ahead(on("cuda:0", "cuda:0"), model)


def test_not_where_steps_are_long_or_launches_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, config = load_model(make_tiny(tmp_path)), on("cuda:0", "cuda:1")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert not launches_ahead(config, model)
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING")
    monkeypatch.setattr(target, "LAUNCH_AHEAD_BYTES", model.weight_bytes)
    assert launches_ahead(config, model)
    monkeypatch.setattr(target, "LAUNCH_AHEAD_BYTES", model.weight_bytes - 1)
    assert not launches_ahead(config, model)


def test_not_where_a_profiler_waits_for_the_gpu(tmp_path: Path) -> None:
    model = load_model(make_tiny(tmp_path))
    config = config_from_mapping(
        {"target": {"device": "cuda:0"}, "draft": {"device": "cpu"}, "run": {"torch_profiler": 3}}
    )
    assert not launches_ahead(config, model)
