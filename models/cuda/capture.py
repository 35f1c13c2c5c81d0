"""Capturing a function of fixed tensors as a CUDA graph, or running it as it is.

``torch.compile`` has no place here: torch 2.11 cannot trace a step (it writes to views of static
inference tensors), and there is next to nothing for it to fuse. Of a decoding step of Llama-3.1-8B
on an H200, all but 0.1% is cuBLAS or a kernel of ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

SMALLEST_CONTEXT = 1024  # positions; contexts are bucketed in factors of four from here
WARM_UP_RUNS = 2
"""Runs before a capture: kernels are compiled, and libraries make their handles, in the first."""


@dataclass(frozen=True, slots=True)
class GraphOptions:
    """Attributes:
    enforce_eager: launch kernel by kernel, without graphs.
    """

    enforce_eager: bool = False


class GraphPool:
    """Memory that graphs share, so that each needs only what no other is using.

    Graphs of one pool must not run at the same time: launch them on one stream.
    """

    def __init__(self, options: GraphOptions | None = None) -> None:
        self.options = options or GraphOptions()
        self._handle: Any = None

    def capture(self, function: Callable[[], None], device: torch.device) -> Callable[[], None]:
        """A callable that does what ``function`` did when captured, on the tensors it used then.

        ``function`` is called a few times first and must be harmless on its tensors' present
        contents. It must not make the host wait.
        """
        if self.options.enforce_eager or device.type != "cuda":
            return function
        with torch.cuda.device(device):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(WARM_UP_RUNS):
                    function()
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            if self._handle is None:
                self._handle = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            # Only this thread: NCCL's watchdog asks for events of earlier collectives meanwhile.
            with torch.cuda.graph(
                graph, pool=self._handle, stream=side, capture_error_mode="thread_local"
            ):
                function()
        return graph.replay


def bucket_of(count: int, most: int) -> int:
    """The smallest power of two that holds ``count``, or ``most`` if that is less."""
    bucket = 1
    while bucket < count:
        bucket *= 2
    return min(bucket, most)


def row_buckets(most: int) -> list[int]:
    """Every bucket that ``bucket_of`` gives for 1..most."""
    return sorted({bucket_of(count, most) for count in (*(1 << i for i in range(10)), most)})


@lru_cache(maxsize=4096)
def context_bucket(blocks: int, block_size: int, most: int) -> int:
    """Blocks of the smallest context bucket that holds ``blocks``, at most ``most``."""
    return next(size for size in context_buckets(block_size, most) if size >= min(blocks, most))


def context_buckets(block_size: int, most: int) -> list[int]:
    """Every context bucket, in blocks, rising; the last is ``most``."""
    sizes, size = [], max(1, SMALLEST_CONTEXT // block_size)
    while size < most:
        sizes.append(size)
        size *= 4
    return [*sizes, most]
