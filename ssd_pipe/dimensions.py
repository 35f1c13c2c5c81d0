"""Sizes that every process derives alike from the configuration and the two models' configs."""

from __future__ import annotations

from dataclasses import dataclass

import psutil

from ipc.messages.target import TOKEN_BYTES
from ipc.shm_channel import DEFAULT_CAPACITY
from models.config import ModelConfig
from ssd_pipe.config import PipelineConfig, branch_budget
from ssd_pipe.engine.partition import part_entries
from ssd_pipe.errors import ConfigError
from ssd_pipe.hub import resolve

KV_MEMORY_SHARE = 0.25
"""Most of the machine's memory that one side's KV takes when its size is left to us (CPU)."""


@dataclass(frozen=True, slots=True)
class Dimensions:
    """Derived sizes.

    Attributes:
        max_model_len: tokens of one request, prompt and output.
        vocab_size: of both models.
        target_blocks, draft_blocks: KV blocks for trunks.
        scratch_blocks: KV blocks of a draft worker for its branches.
        slots, branches, k: shape of the speculation cache, all draft workers together.
        worker_branches: branches of a sequence that one draft worker extends.
        plan_bytes: capacity of the channels that carry plans.
    """

    max_model_len: int
    vocab_size: int
    target_blocks: int
    draft_blocks: int
    scratch_blocks: int
    slots: int
    branches: int
    worker_branches: int
    k: int
    plan_bytes: int


def dimensions(config: PipelineConfig) -> Dimensions:
    """Derive sizes. Raises ConfigError naming a setting that does not fit the models."""
    target = ModelConfig.from_folder(resolve(config.target.model))
    limit = target.max_positions
    spec = config.speculation
    draft = None
    if config.speculative:
        draft = ModelConfig.from_folder(resolve(config.draft.model))
        limit = min(limit, draft.max_positions)
        if draft.vocab_size != target.vocab_size:
            raise ConfigError(
                "draft.model",
                f"vocabulary of {draft.vocab_size} tokens, the target's has {target.vocab_size}; "
                "a draft needs the target's (--draft), and mode ar needs none",
            )
    wanted = config.scheduler.max_model_len
    if wanted > limit:
        raise ConfigError("scheduler.max_model_len", f"{wanted} is over the models' {limit}")
    max_len = wanted or limit
    size, slots = config.cache.block_size, config.scheduler.max_num_seqs
    branches = branch_budget(spec)
    own = part_entries(branches, max(1, config.draft_workers))
    one = -(-(max_len + spec.k + 1) // size)

    def blocks(field: str, wanted: int, model: ModelConfig) -> int:
        return _blocks(f"cache.{field}", wanted, one, slots, _block_bytes(model, size))

    return Dimensions(
        max_model_len=max_len,
        vocab_size=target.vocab_size,
        target_blocks=blocks("target_blocks", config.cache.target_blocks, target),
        draft_blocks=blocks("draft_blocks", config.cache.draft_blocks, draft) if draft else 0,
        scratch_blocks=-(-slots * own * spec.k // size) if config.mode == "ssd" else 0,
        slots=slots,
        branches=branches,
        worker_branches=own,
        k=spec.k,
        plan_bytes=plan_bytes(slots, max_len, size),
    )


def plan_bytes(slots: int, max_model_len: int, block_size: int) -> int:
    """Capacity of a channel for plans: one may bring a prompt of full length, and the block table
    of every sequence."""
    tables = slots * -(-max_model_len // block_size)
    return DEFAULT_CAPACITY + TOKEN_BYTES * (max_model_len + tables)


def _block_bytes(model: ModelConfig, block_size: int) -> int:
    return 2 * 4 * model.num_layers * model.num_kv_heads * model.head_dim * block_size


def _blocks(field: str, wanted: int, one: int, slots: int, block_bytes: int) -> int:
    if wanted and wanted < one:
        raise ConfigError(field, f"{wanted} blocks do not hold one request of full length ({one})")
    if wanted:
        return wanted
    affordable = int(psutil.virtual_memory().total * KV_MEMORY_SHARE) // block_bytes
    return max(one, min(one * slots, affordable))
