from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def rng() -> torch.Generator:
    """Seeded anew every time."""
    generator = torch.Generator()
    seed = int.from_bytes(os.urandom(4), "little")
    print("seed", seed)  # shown when a test fails
    return generator.manual_seed(seed)
