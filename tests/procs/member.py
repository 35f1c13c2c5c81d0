"""A process of a run without a model: ``python -m tests.procs.member ROLE BEHAVIOUR CONFIG RANK``.

It uses the real runtime and the real hub; only the work in the middle is missing. A hasty one exits
as soon as it has closed its connection, where others still have a moment of tidying up.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import msgspec

from procs.hub import Hub
from procs.runtime import Runtime, run_process
from ssd_pipe.config import PipelineConfig
from ssd_pipe.errors import ConfigError, PeerLost

FOREVER = 600.0


def tell(what: str, **fields: object) -> None:
    sys.stdout.buffer.write(msgspec.json.encode({"what": what, **fields}) + b"\n")
    sys.stdout.flush()


def scheduler(runtime: Runtime) -> None:
    serve(runtime)
    if BEHAVIOUR == "hasty":
        os._exit(0)


def serve(runtime: Runtime) -> None:
    with Hub(runtime) as hub:
        tell("listening")
        facts = hub.wait_ready(runtime.config.run.ready_timeout)
        runtime.ready({})
        hub.announce({"answer": 42})
        tell("ready", facts=facts, states=hub.states(), transport=runtime.transport)
        if BEHAVIOUR == "stuck":
            time.sleep(FOREVER)
        missed = ""
        while not runtime.stopping.is_set():
            runtime.alive()
            if (absence := hub.absence("draft")) != missed:
                missed = absence
                tell("absent" if missed else "back", reason=missed, states=hub.states())
            try:
                hub.raise_lost()
            except PeerLost as error:
                tell("lost", reason=str(error), states=hub.states())
                raise
            runtime.stopping.wait(0.02)


def worker(runtime: Runtime) -> None:
    if BEHAVIOUR == "bad-config":
        raise ConfigError("target.model", "no such folder")
    if BEHAVIOUR == "bug":
        raise ValueError("two\nlines")
    if BEHAVIOUR == "misses-frontend":
        raise PeerLost("nothing comes from over there", "frontend")
    if BEHAVIOUR == "hasty":
        runtime.fail("in a hurry")
        assert runtime.link is not None
        runtime.link.close()
        os._exit(1)
    if BEHAVIOUR == "never-ready":
        tell("loading")
        runtime.stopping.wait(FOREVER)
        runtime.stopping.check()
    group = runtime.ready({"rank": runtime.rank, "threads": runtime.threads})
    tell("ready", group=group, transport=runtime.transport, returning=runtime.returning)
    if BEHAVIOUR == "stuck":
        time.sleep(FOREVER)
    while not runtime.stopping.wait(0.1):
        runtime.alive()
    tell("stopping", reason=runtime.stopping.reason)


if __name__ == "__main__":
    ROLE, BEHAVIOUR, CONFIG, RANK = sys.argv[1:]
    config = msgspec.json.decode(Path(CONFIG).read_bytes(), type=PipelineConfig)
    if BEHAVIOUR == "other-config":
        spec = msgspec.structs.replace(config.speculation, k=config.speculation.k + 1)
        config = msgspec.structs.replace(config, speculation=spec)
    body = scheduler if ROLE == "scheduler" else worker
    sys.exit(run_process(ROLE, config, body, rank=int(RANK), pretty_logs=False))
