"""The kernels of leased rounds, compiled."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device: torch.cuda.is_available() is false", allow_module_level=True)
if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from tests.models.leased_kernel_cases import *  # noqa: F403
