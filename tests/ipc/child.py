"""The other process of the ipc tests: ``python -m tests.ipc.child COMMAND ARGS``."""

from __future__ import annotations

import random
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

from ipc.lockstep import Lockstep
from ipc.probe import CANDIDATES, respond
from ipc.ring import Ring
from ipc.rundir import RunDir, RunInUse
from ipc.shm_channel import ShmChannel
from ssd_pipe.errors import ResourceError


def records(seed: int, count: int, longest: int) -> Iterator[bytes]:
    """The same records in both processes."""
    rng = random.Random(seed)
    for _ in range(count):
        yield rng.randbytes(rng.choice((0, 1, 7, 8, 9, rng.randrange(longest))))


def tell(*words: object) -> None:
    print(*words, flush=True)


def hold(shm_dir: str, how: str, name: str = "") -> None:
    """Hold a run until stdin says anything; end of file leaves as well."""
    run = getattr(RunDir, how)(shm_dir, name)
    channel = ShmChannel.open(run, "self", 4096)
    channel.send(run.name.encode())
    tell(run.name, int(run.created), (channel.recv(1) or b"").decode())
    sys.stdin.readline()
    run.close()


def compete(shm_dir: str, name: str) -> None:
    """Try to create a run; say whether it worked and hold what was created."""
    try:
        run = RunDir.create(shm_dir, name)
    except RunInUse:
        tell("in-use")
        return
    tell("created")
    sys.stdin.readline()
    run.close()


def produce(path: str, seed: str, count: str, longest: str) -> None:
    ring = Ring.open(Path(path))
    for record in records(int(seed), int(count), int(longest)):
        ring.send(record)


def produce_forever(path: str) -> None:
    """Numbered records with a checksum, until killed."""
    ring = Ring.open(Path(path))
    rng = random.Random(5)
    number = 0
    tell("going")
    while True:
        body = number.to_bytes(8, "little") + rng.randbytes(rng.randrange(200))
        ring.send(zlib.crc32(body).to_bytes(4, "little") + body, timeout=60)
        number += 1


def echo(shm_dir: str, name: str, spin_us: str = "0") -> None:
    """Send every record of channel "there" back on "back" until an empty one comes."""
    with RunDir.open(shm_dir, name) as run:
        there = ShmChannel.open(run, "there", spin_us=int(spin_us))
        back = ShmChannel.open(run, "back")
        tell("ready")
        while (record := there.recv(20)) is not None:
            back.send(record)
            if not record:
                return


def answer_probe(shm_dir: str, name: str, link: str, *allowed: str) -> None:
    with RunDir.open(shm_dir, name) as run:
        tell(respond(run, link, [c for c in CANDIDATES if c.name in allowed]))


def keep_step(shm_dir: str, name: str) -> None:
    """The other side of test_lockstep: one step for each of its."""

    def fail() -> None:
        raise OSError("theirs")

    with RunDir.open(shm_dir, name) as run:
        out, back = ShmChannel.open(run, "back"), ShmChannel.open(run, "there")
        link = Lockstep(out, back, first=False)
        tell(link.together(lambda: b"two").decode())
        for step in (lambda: None, fail):
            try:
                link.both(step)
            except ResourceError as error:
                tell(error)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
