"""A tiny target and drafts that agree with it never, sometimes, always."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.tiny import make_tiny, perturbed


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("target"), vocab_size=61)


@pytest.fixture(scope="session")
def drafts(tmp_path_factory: pytest.TempPathFactory, target: Path) -> dict[str, Path]:
    """By name: "same" is the target, "near" a noisy copy of it, "far" another model."""
    folder = tmp_path_factory.mktemp("drafts")
    near = perturbed(target, folder / "near", 0.15)
    far = make_tiny(folder, vocab_size=61, name="far", seed=99)
    return {"same": target, "near": near, "far": far}
