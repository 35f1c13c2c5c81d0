"""The draft's CUDA graphs, as its process has them made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from models.kv_cache import KVCache
from models.transformer import Transformer
from procs.device_link import DraftLink
from ssd_pipe.config import PipelineConfig
from ssd_pipe.dimensions import Dimensions
from ssd_pipe.drafting.passes import chain_vocab
from ssd_pipe.drafting.trunks import PREFILL_CHUNK
from ssd_pipe.first_passes import make_first_passes

if TYPE_CHECKING:
    from ssd_pipe.drafting.graphed import GraphedDraft


def make_graphs(
    config: PipelineConfig,
    model: Transformer,
    kv: KVCache,
    sizes: Dimensions,
    scratch_start: int,
    link: DraftLink | None,
) -> GraphedDraft | None:
    """CUDA graphs for the draft's passes, made, where it can have them; kernels of other passes
    are compiled too."""
    if model.backend.name != "cuda" or config.draft.enforce_eager:
        return None
    from ssd_pipe.drafting.graphed import GraphedDraft

    hooks = follower = None
    if link is not None and link.tables is not None:
        from models.cuda.rounds.follow import Follower
        from models.cuda.rounds.publish import TreePublisher

        hooks = TreePublisher(link.tables)
        if not config.run.torch_profiler:  # it waits for the GPU whenever it likes
            follower = Follower(link.tables, model.backend.device)
    positions = sizes.max_model_len + sizes.k + 1
    graphs = GraphedDraft(
        model,
        kv,
        config.speculation,
        scratch_start,
        sizes.worker_branches,
        sizes.slots,
        positions,
        chain_vocab(config.speculation, model),
        hooks=hooks,
        follower=follower,
        workers=config.draft_workers,
    )
    graphs.warm_up(config.mode == "ssd")
    make_first_passes(model, kv, PREFILL_CHUNK, positions, choose=False)
    return graphs
