"""The engine's scheduler as the configuration has it."""

from __future__ import annotations

from ssd_pipe.config import PipelineConfig
from ssd_pipe.dimensions import Dimensions
from ssd_pipe.engine.blocks import BlockManager
from ssd_pipe.engine.scheduler import Scheduler
from ssd_pipe.threads import on_cpu


def make_scheduler(config: PipelineConfig, sizes: Dimensions, blocks: int) -> Scheduler:
    """For a target of so many KV blocks."""
    return Scheduler(
        blocks=BlockManager(blocks, config.cache.block_size, config.cache.prefix_caching),
        max_num_seqs=config.scheduler.max_num_seqs,
        max_model_len=sizes.max_model_len,
        max_batched_tokens=config.scheduler.max_batched_tokens,
        lookahead=config.speculation.k if config.speculative else 0,
        max_waiting=config.scheduler.max_waiting,
        long_prefill=_long_prefill(config),
    )


def _long_prefill(config: PipelineConfig) -> int:
    given = config.scheduler.long_prefill_token_threshold
    return given or (config.scheduler.max_batched_tokens // 4 if on_cpu(config) else 0)
