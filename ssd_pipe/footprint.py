"""Shared memory a run needs, so that a small /dev/shm is refused before anything starts."""

from __future__ import annotations

from ipc.handover import Handover
from ipc.round_records import RoundRecords
from ssd_pipe.config import PipelineConfig, branch_budget
from ssd_pipe.dimensions import dimensions, plan_bytes
from ssd_pipe.engine import partitioned_cache
from ssd_pipe.errors import ConfigError, ModelError

MIB = 1 << 20
RING_BYTES = MIB
RINGS_PER_CHANNEL = 4
FIXED_BYTES = MIB  # sockets, doorbells, config, locks
LIKE_BUILT_IN = (49_152, 8192)  # vocabulary and context of the built-in pair


def channels(config: PipelineConfig) -> int:
    """Hot-path channels: one per target rank, one more to each draft worker."""
    return config.target.tp + config.draft_workers


def cache_bytes(config: PipelineConfig) -> int:
    """The speculation cache: every branch of the larger fan-out, for every running sequence."""
    spec = config.speculation
    if config.mode != "ssd":
        return 0
    return partitioned_cache.size_bytes(
        config.scheduler.max_num_seqs, branch_budget(spec), spec.k, config.draft_workers
    )


def records_bytes(config: PipelineConfig) -> int:
    """Records of leased rounds, where there can be any."""
    spec = config.speculation
    if config.mode != "ssd" or not spec.leased_rounds:
        return 0
    return RoundRecords.size_bytes(config.scheduler.max_num_seqs, spec.k)


def handover_bytes(config: PipelineConfig, vocab_size: int) -> int:
    """Draft distributions for the rejection rule, of every draft worker."""
    if not config.speculative or config.speculation.rule != "rejection":
        return 0
    slots, k = config.scheduler.max_num_seqs, config.speculation.k
    return config.draft_workers * Handover.size_bytes(slots, k, vocab_size)


def shared_bytes(config: PipelineConfig, vocab_size: int, max_model_len: int = 0) -> int:
    """Bytes of shared memory the run directory must be able to hold, in whole MiB.

    ``max_model_len`` is what the models allow where the configuration leaves it to them.
    """
    max_len = config.scheduler.max_model_len or max_model_len
    plans = plan_bytes(config.scheduler.max_num_seqs, max_len, config.cache.block_size)
    needed = (
        FIXED_BYTES
        + channels(config) * (RINGS_PER_CHANNEL * RING_BYTES + plans)
        + cache_bytes(config)
        + records_bytes(config)
        + handover_bytes(config, vocab_size)
    )
    return -(-needed // MIB) * MIB


def expected_bytes(config: PipelineConfig) -> tuple[int, str]:
    """``shared_bytes`` for the configured models, and what had to be assumed to say it.

    Models that are not here, or do not fit each other or the settings, are taken for ones like the
    built-in pair. The text says so and why; it is empty where nothing is assumed.
    """
    try:
        sizes = dimensions(config)
    except (ConfigError, ModelError) as error:
        vocab, context = LIKE_BUILT_IN
        longest = config.scheduler.max_model_len or context
        assumed = f"a vocabulary of {vocab} and requests of {longest} tokens; {error}"
        return shared_bytes(config, vocab, longest), assumed
    return shared_bytes(config, sizes.vocab_size, sizes.max_model_len), ""
