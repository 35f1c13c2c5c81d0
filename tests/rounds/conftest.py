"""A tiny target and drafts that agree with it never, sometimes, always."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.tiny import make_tiny


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("target"), vocab_size=61)


@pytest.fixture(scope="session")
def drafts(tmp_path_factory: pytest.TempPathFactory, target: Path) -> dict[str, Path]:
    """By name: "same" is the target, "near" a noisy copy of it, "far" another model."""
    folder = tmp_path_factory.mktemp("drafts")
    near = make_tiny(folder, vocab_size=61, name="near")
    weights = load_file(target / "model.safetensors")
    generator = torch.Generator().manual_seed(7)
    noisy = {
        name: w + 0.15 * w.std() * torch.randn(w.shape, generator=generator)
        if w.dim() == 2
        else w
        for name, w in weights.items()
    }
    save_file(noisy, near / "model.safetensors", metadata={"format": "pt"})
    far = make_tiny(folder, vocab_size=61, name="far", seed=99)
    return {"same": target, "near": near, "far": far}
