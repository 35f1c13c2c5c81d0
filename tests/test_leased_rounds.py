"""What doctor says of rounds without the scheduler, on machines with so many GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ssd_pipe import leased_rounds
from ssd_pipe.config import config_from_mapping

LEASED = "leased, speculation cache on the GPU"


def described(monkeypatch: pytest.MonkeyPatch, gpus: int, **devices: Any) -> str:
    """On a machine where cuda:2 and cuda:1 do not reach each other, and all others do."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(leased_rounds, "usable_gpus", lambda: gpus)

    def reach(one: int, other: int) -> bool:
        assert max(one, other) < gpus  # torch raises
        return {one, other} != {1, 2}

    monkeypatch.setattr(torch.cuda, "can_device_access_peer", reach)
    sections = {role: {"device": device} for role, device in devices.items()}
    return leased_rounds.describe(config_from_mapping({"mode": "ssd", **sections}))


@pytest.mark.parametrize(
    ("gpus", "target", "draft", "reason"),
    [
        (0, "auto", "auto", "no GPU"),
        (1, "auto", "auto", "target and draft would share cuda:0"),
        (2, "auto", "auto", ""),
        (2, "cuda:1", "cuda:0", ""),
        (2, "cuda", "cuda", ""),
        (2, "cuda:0", "cuda:0", "target and draft would share cuda:0"),
        (2, "cuda:1", "auto", "target and draft would share cuda:1"),
        (2, "cpu", "cpu", "the target computes on the CPU"),
        (2, "cpu", "auto", "the target computes on the CPU"),
        (2, "auto", "cpu", "the draft computes on the CPU"),
        (2, "auto", "cuda:2", "there is no cuda:2"),
        (3, "cuda:0", "cuda:2", ""),
        (3, "cuda:2", "auto", "cuda:1 cannot reach the memory of cuda:2"),
    ],
)
def test_the_devices_are_those_of_the_configuration(
    monkeypatch: pytest.MonkeyPatch, gpus: int, target: str, draft: str, reason: str
) -> None:
    said = described(monkeypatch, gpus, target=target, draft=draft)
    assert said == (f"through the scheduler: {reason}" if reason else LEASED)


def test_the_one_gpu_that_is_visible_is_both(monkeypatch: pytest.MonkeyPatch) -> None:
    said = described(monkeypatch, 1, target="cuda", draft="cuda")
    assert said == "through the scheduler: target and draft would share cuda:0"


@pytest.mark.parametrize("section", [{"target": {"tp": 2}}, {"draft": {"enforce_eager": True}}])
def test_what_the_configuration_excludes_comes_first(
    monkeypatch: pytest.MonkeyPatch, section: dict[str, Any]
) -> None:
    monkeypatch.setattr(leased_rounds, "usable_gpus", lambda: 1)
    config = config_from_mapping({"mode": "ssd", **section})
    assert "GPU" not in leased_rounds.describe(config)
