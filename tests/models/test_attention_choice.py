from __future__ import annotations

import pytest
import torch

from models.backends import make_backend
from models.cuda.flashinfer import FlashInferAttention, installed
from ssd_pipe.errors import ConfigError


@pytest.mark.parametrize("attention", ["flashinfer", "triton"])
def test_a_kernel_for_gpus_is_refused_on_a_cpu(attention: str) -> None:
    with pytest.raises(
        ConfigError, match=f"attention: {attention} needs the cuda backend on a GPU"
    ):
        make_backend("auto", "cpu", attention=attention)  # type: ignore[arg-type]


@pytest.mark.skipif(installed(), reason="FlashInfer is installed")
def test_flashinfer_that_is_missing_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"flashinfer is not installed: pip install 'ssd-pipe\[cuda]'"
    ):
        FlashInferAttention(torch.device("cuda"), torch.bfloat16)


@pytest.mark.skipif(not installed(), reason="FlashInfer is not installed")
def test_flashinfer_computes_in_bfloat16_only() -> None:
    with pytest.raises(ConfigError, match="flashinfer computes in bfloat16"):
        FlashInferAttention(torch.device("cuda"), torch.float32)
