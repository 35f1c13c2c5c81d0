"""Target worker: one tensor-parallel rank of the target model.

Takes step plans from the scheduler, runs them, and (rank 0) answers with the outcomes.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from ipc.channel import TypedReceiver, TypedSender
from ipc.doorbell import Doorbell
from ipc.handover import Handover
from ipc.messages.target import Ahead, StepPlan, StepResult
from models.kv_cache import KVCache
from models.parallel import TensorParallel
from models.registry import load_model
from models.transformer import Transformer
from procs import channels
from procs.device_link import FACT, TargetLink
from procs.device_probe import agree, describe_device
from procs.placement import Threads, kv_blocks, place, sharers, spin_us
from procs.profiling import StepProfiler
from procs.runtime import Runtime
from procs.target_leases import run_lease
from procs.target_steps import TargetSteps
from ssd_pipe import slow_kernels
from ssd_pipe.config import PipelineConfig, load_format
from ssd_pipe.dimensions import Dimensions, dimensions
from ssd_pipe.engine.partition import maker
from ssd_pipe.first_passes import make_first_passes
from ssd_pipe.hub import resolve
from ssd_pipe.members import process_name
from ssd_pipe.sampling.grammar import Grammars
from ssd_pipe.verification.verifier import Verifier

if TYPE_CHECKING:
    from ssd_pipe.verification.graphed import GraphedSteps

POLL = 0.5  # seconds between looks at the stop flag
GATE_PATIENCE = 5e-3
"""Seconds a step that was launched ahead is kept waiting for a plan. One given up costs the next
step its time, and chains drafted just in time take a millisecond or two."""
LAUNCH_AHEAD_BYTES = 4_000_000_000
"""Weights of a target that launches steps before their input is known: a step takes under about a
millisecond then. What is saved is a tenth of one in each, and one launched in vain costs a whole
step."""
HANDOVER_TIMEOUT = 2.0  # seconds; a draft that is later has died or hangs


def run(runtime: Runtime) -> None:
    """Body of the process "target-<rank>"."""
    config, rank = runtime.config, runtime.rank
    sizes = dimensions(config)
    device = place(config, "target", rank)
    runtime.notes["device"] = describe_device(device)
    if config.speculative and rank == 0:
        agree(runtime, device)
    store = f"file://{runtime.rundir.path / 'tensor-parallel'}"
    link = TargetLink(runtime, sizes, device) if config.mode == "ssd" and rank == 0 else None
    tp = TensorParallel.create(rank, config.target.tp, store, device)
    model = load_model(
        resolve(config.target.model),
        dtype=config.target.dtype,
        device=str(device),
        backend=config.target.backend,
        attention=config.target.attention,
        tp=tp,
        load_format=load_format(config.target),
        seed=config.target.seed,
        max_positions=sizes.max_model_len,
    )
    blocks = kv_blocks(model, config, sizes, "target", rank)
    kv = model.make_kv(blocks, config.cache.block_size)
    verifier = Verifier(
        model,
        kv,
        config.cache.block_size,
        config.speculation.rule,
        _Proposals(runtime, sizes),
        Grammars.of_model(resolve(config.target.model), sizes.vocab_size),
        _graphs(config, model, kv, sizes, link),
    )
    plans = TypedReceiver.open(
        runtime,
        channels.target_plans(rank),
        StepPlan | Ahead,
        capacity=sizes.plan_bytes,
        spin_us=spin_us(device),
    )
    results = TypedSender.open(runtime, channels.RESULTS, StepResult) if rank == 0 else None
    slow_kernels.note(runtime.notes, runtime.log, model.backend.fallback)
    runtime.log.info(
        "loaded",
        backend=model.backend.name,
        weight_bytes=model.weight_bytes,
        device=str(device),
        kv_blocks=blocks,
        threads=torch.get_num_threads(),
    )
    profiler = StepProfiler(runtime, before_stop=verifier.release)
    steps = TargetSteps(
        runtime,
        sizes,
        verifier,
        plans,
        results,
        Threads(runtime, device),
        profiler,
        spins=spin_us(device) > 0,
    )
    facts = {
        "vocab_size": sizes.vocab_size,
        "weight_bytes": model.weight_bytes,
        "num_blocks": blocks,
    }
    if link is not None:
        facts[FACT] = int(link.confirm())
        runtime.log.info("leased rounds", possible=bool(facts[FACT]), reason=link.reason)
    runtime.ready(facts)
    try:
        while not runtime.stopping.is_set():
            runtime.alive()
            plan = plans.recv(GATE_PATIENCE if verifier.gated else POLL)
            if plan is None:
                verifier.release()
            if isinstance(plan, Ahead):
                continue  # leave that comes after the step has ended is void
            if plan is not None and plan.lease is None:
                plan = steps.run(plan)
            if plan is not None and link is not None:
                with profiler.step(f"lease {plan.step}"):
                    result = run_lease(runtime, verifier, link, plan)
                if results is not None:
                    results.send(result)
    finally:
        profiler.close()
        verifier.close()
        if link is not None:
            link.close()
        tp.close()


def _graphs(
    config: PipelineConfig,
    model: Transformer,
    kv: KVCache,
    sizes: Dimensions,
    link: TargetLink | None,
) -> GraphedSteps | None:
    """CUDA graphs for decoding and verification, made, where this rank can have them; kernels of
    other steps are compiled too."""
    if model.backend.name != "cuda" or config.target.enforce_eager:
        return None
    from ssd_pipe.verification.graphed import GraphedSteps

    leased = None
    if link is not None and link.tables is not None:
        from ssd_pipe.verification.leased import LeasedRounds

        synthetic = bool(config.speculation.synthetic_acceptance)
        leased = LeasedRounds(link.tables, model.backend.device, synthetic)
    wide = config.speculative or config.target.pad_steps
    positions = sizes.max_model_len + sizes.k + 1
    graphs = GraphedSteps(
        model,
        kv,
        sizes.slots,
        positions,
        (sizes.k + 1,) if wide else (1,),
        leased=leased,
        ahead=launches_ahead(config, model),
    )
    graphs.warm_up()
    make_first_passes(model, kv, config.scheduler.max_batched_tokens, positions, choose=True)
    return graphs


def launches_ahead(config: PipelineConfig, model: Transformer) -> bool:
    """Whether steps may wait on the GPU for their input: not where a draft needs the same GPU, and
    not where the host waits for the GPU whenever it likes, launch by launch or in a profiler."""
    alone = sharers(config, process_name(config, "target"), torch.cuda.device_count()) == 1
    blocking = os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0"
    waits = blocking or config.run.torch_profiler > 0
    small = model.weight_bytes <= LAUNCH_AHEAD_BYTES
    return alone and small and not waits and config.target.tp == 1


class _Proposals:
    """Draft distributions out of shared memory, mapped at first use: the draft makes them.

    A draft that was late once is not waited for again until one of its hand-overs is there in time.
    """

    def __init__(self, runtime: Runtime, sizes: Dimensions) -> None:
        self._rundir = runtime.rundir
        self._sizes = sizes
        self._workers = max(1, runtime.config.draft_workers)
        self._handovers: dict[int, Handover] = {}
        self._in_time = True

    def __call__(self, slot: int, number: int, length: int) -> torch.Tensor | None:
        worker = maker(number, self._workers)
        handover = self._handovers.get(worker)
        if handover is None:
            sizes, name = self._sizes, channels.handover(worker)
            handover = self._handovers[worker] = Handover.open(
                self._rundir.segment(name),
                Doorbell(self._rundir.bell(name)),
                sizes.slots,
                sizes.k,
                sizes.vocab_size,
            )
        timeout = HANDOVER_TIMEOUT if self._in_time else 0.0
        rows = handover.take(slot, number, length, timeout)
        self._in_time = handover.arrived(slot, number)
        return None if rows is None else torch.from_numpy(rows)
