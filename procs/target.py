"""Target worker: one tensor-parallel rank of the target model.

Takes step plans from the scheduler, runs them, and (rank 0) answers with the outcomes.
"""

from __future__ import annotations

import time

import torch

from ipc.channel import TypedReceiver, TypedSender
from ipc.doorbell import Doorbell
from ipc.handover import Handover
from ipc.messages import Halt, StepPlan, StepResult, TargetMessage
from models.parallel import TensorParallel
from models.registry import load_model, resolve_device
from procs import channels
from procs.runtime import Runtime
from ssd_pipe.dimensions import Dimensions, dimensions
from ssd_pipe.hub import resolve
from ssd_pipe.sampling.grammar import Grammars
from ssd_pipe.verification.verifier import Verifier

POLL = 0.5  # seconds between looks at the stop flag
HANDOVER_TIMEOUT = 2.0  # seconds; a draft that is later has died or lost the distributions


def run(runtime: Runtime) -> None:
    """Body of the process "target-<rank>"."""
    config, rank = runtime.config, runtime.rank
    sizes = dimensions(config)
    device = resolve_device(config.target.device)
    store = f"file://{runtime.rundir.path / 'tensor-parallel'}"
    tp = TensorParallel.create(rank, config.target.tp, store, device)
    model = load_model(
        resolve(config.target.model),
        dtype=config.target.dtype,
        device=str(device),
        backend=config.target.backend,
        tp=tp,
        max_positions=sizes.max_model_len,
    )
    kv = model.make_kv(sizes.target_blocks, config.cache.block_size)
    verifier = Verifier(
        model,
        kv,
        config.cache.block_size,
        config.speculation.rule,
        _Proposals(runtime, sizes),
        Grammars.of_model(resolve(config.target.model), sizes.vocab_size),
    )
    plans = TypedReceiver.open(
        runtime, channels.target_plans(rank), TargetMessage, capacity=sizes.target_plan_bytes
    )
    results = TypedSender.open(runtime, channels.RESULTS, StepResult) if rank == 0 else None
    runtime.log.info(
        "loaded",
        backend=model.backend.name,
        weight_bytes=model.weight_bytes,
        kv_blocks=sizes.target_blocks,
        threads=torch.get_num_threads(),
    )
    runtime.ready({"vocab_size": sizes.vocab_size, "weight_bytes": model.weight_bytes})
    try:
        while not runtime.stopping.is_set():
            runtime.alive()
            message = plans.recv(POLL)
            if isinstance(message, Halt):
                break
            if message is not None:
                result = _execute(verifier, message, runtime)
                if results is not None:
                    results.send(result)
    finally:
        tp.close()


def _execute(verifier: Verifier, plan: StepPlan, runtime: Runtime) -> StepResult:
    started = time.monotonic_ns()
    verified = verifier.run(plan)
    finished = time.monotonic_ns()
    runtime.log.info(
        "verify",
        step=plan.step,
        start=started,
        forward=verified.forward_ns,
        end=finished,
        rows=len(plan.rows),
        tokens=sum(len(row.tokens) for row in plan.rows),
    )
    return StepResult(plan.step, verified.outcomes, started, verified.forward_ns, finished)


class _Proposals:
    """Draft distributions out of shared memory, mapped at first use: the draft makes them."""

    def __init__(self, runtime: Runtime, sizes: Dimensions) -> None:
        self._rundir = runtime.rundir
        self._sizes = sizes
        self._handover: Handover | None = None

    def __call__(self, slot: int, number: int, length: int) -> torch.Tensor | None:
        if self._handover is None:
            sizes = self._sizes
            self._handover = Handover.open(
                self._rundir.segment("handover"),
                Doorbell(self._rundir.bell("handover")),
                sizes.slots,
                sizes.k,
                sizes.vocab_size,
            )
        rows = self._handover.take(slot, number, length, HANDOVER_TIMEOUT)
        return None if rows is None else torch.from_numpy(rows)
