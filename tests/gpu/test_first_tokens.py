"""First tokens after a prompt, compiled: the eager path's are the graphs', bit for bit."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device: torch.cuda.is_available() is false", allow_module_level=True)
if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from tests.models.first_token_cases import *  # noqa: F403
