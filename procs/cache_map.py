"""The speculation cache as its readers see it."""

from __future__ import annotations

from ipc.segments import open_segment
from procs import channels
from procs.runtime import Runtime
from ssd_pipe.dimensions import Dimensions
from ssd_pipe.engine.partitioned_cache import PartitionedCache, size_bytes


def map_cache(runtime: Runtime, sizes: Dimensions) -> PartitionedCache:
    """The cache of a run, once every draft worker is ready and has made its part."""
    shape, workers = (sizes.slots, sizes.branches, sizes.k), max(1, runtime.config.draft_workers)
    segment = open_segment(
        runtime.rundir.segment(channels.SPECULATION_CACHE), size_bytes(*shape, workers)
    )
    return PartitionedCache(segment, *shape, workers, sizes.vocab_size)
