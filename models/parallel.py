"""Collectives between tensor-parallel ranks.

On GPUs they are NCCL's, queued on the current stream, so a CUDA graph can hold them. NVLink
multicast stays off: it is a resource of the whole host, which a process that dies with it can leave
unusable. Without it, torch's one-shot sum over symmetric memory took as long as NCCL's in a step on
two H200s (12 to 14 us of 8 to 256 KiB), so every sum is NCCL's.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from ipc.errors import PeerLost

MULTICAST_OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


class TensorParallel:
    """The ranks of one model; this base is the group of one, whose collectives do nothing.

    ``create`` gives the group that fits.
    """

    rank: int = 0
    size: int = 1

    @staticmethod
    def create(
        rank: int,
        size: int,
        init_method: str,
        device: torch.device | str = "cpu",
        timeout: float = 300.0,
    ) -> TensorParallel:
        """Join the group as ``rank`` of ``size``: gloo on a CPU, NCCL on CUDA devices.

        ``init_method`` is torch's: ``file:///path`` (a fresh file all ranks can write) on one host,
        ``tcp://host:port`` over several. ``timeout`` seconds bound the meeting and every
        collective. Raises PeerLost if the ranks do not meet. A size of 1 joins nothing.
        """
        if size == 1:
            return TensorParallel()
        on_gpu = torch.device(device).type == "cuda"
        if init_method.startswith("file:") and sys.platform == "linux":
            # All ranks are on this host; gloo's own guess resolves the host name, which may fail.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        for name, value in MULTICAST_OFF.items():
            os.environ.setdefault(name, value)
        try:
            dist.init_process_group(
                "nccl" if on_gpu else "gloo",
                init_method=init_method,
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout),
                device_id=torch.device(device) if on_gpu else None,
            )
        except RuntimeError as error:
            raise _lost(error) from error
        return TorchTensorParallel(rank, size)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum ``x`` over the ranks, in place; returns it. Raises PeerLost."""
        return x

    def gather_logits(self, local: torch.Tensor, vocab_size: int) -> torch.Tensor | None:
        """[L, padded V / size] per rank -> [L, V] on rank 0, None elsewhere. Raises PeerLost."""
        return local[:, :vocab_size]

    def all_gather_logits(self, local: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """[L, padded V / size] per rank -> the same [L, V] on every rank, contiguous.

        Every rank can then choose the tokens itself, and all choose alike, without the host.
        Raises PeerLost.
        """
        return local[:, :vocab_size].contiguous()

    def close(self) -> None:
        """Leave the group. CUDA graphs that hold its collectives must be gone: NCCL waits for
        them."""


class TorchTensorParallel(TensorParallel):
    """Ranks in separate processes over torch.distributed; ``TensorParallel.create`` joins them."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        try:
            dist.all_reduce(x)
        except RuntimeError as error:
            raise _lost(error) from error
        return x

    def gather_logits(self, local: torch.Tensor, vocab_size: int) -> torch.Tensor | None:
        local = local.contiguous()
        parts = None if self.rank else [torch.empty_like(local) for _ in range(self.size)]
        try:
            dist.gather(local, parts, dst=0)
        except RuntimeError as error:
            raise _lost(error) from error
        if parts is None:
            return None
        return torch.cat(parts, dim=1)[:, :vocab_size]

    def all_gather_logits(self, local: torch.Tensor, vocab_size: int) -> torch.Tensor:
        local = local.contiguous()
        rows, width = local.shape
        parts = local.new_empty((self.size * rows, width))
        try:
            dist.all_gather_into_tensor(parts, local)
        except RuntimeError as error:
            raise _lost(error) from error
        whole = parts.view(self.size, rows, width).transpose(0, 1).reshape(rows, -1)
        return whole[:, :vocab_size].contiguous()

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def _lost(error: RuntimeError) -> PeerLost:
    lines = str(error).splitlines()
    return PeerLost(f"tensor-parallel group: {lines[0] if lines else type(error).__name__}")
