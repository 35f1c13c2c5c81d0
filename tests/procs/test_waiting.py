"""The scheduler's waits: for the target, and for a draft that it can do without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from ipc.channel import TypedReceiver, TypedSender
from ipc.messages.draft import ChainReady, DraftNotice, DraftTimes
from ipc.messages.target import StepResult
from ipc.rundir import RunDir
from procs import channels, waiting
from procs.draft_port import DraftPort
from procs.liveness import StopFlag
from procs.runtime import Runtime
from procs.waiting import Waiter
from ssd_pipe import logs
from ssd_pipe.config import PipelineConfig, config_from_mapping
from ssd_pipe.dimensions import Dimensions
from ssd_pipe.engine.round_times import RoundTimes
from ssd_pipe.engine.rounds import RoundPlanner
from ssd_pipe.errors import PeerLost
from tests.engine.test_leases import request_of

HOUR = 3600.0
SIZES = Dimensions(64, 32, 40, 40, 10, 4, 6, 6, 3, 1 << 14)


class Group:
    """What the scheduler hears of its group, and what happens each time it looks."""

    def __init__(self) -> None:
        self.turns: list[Callable[[], None]] = []

    def raise_lost(self) -> None:
        if self.turns:
            self.turns.pop(0)()

    def absence(self, name: str) -> str:
        return ""


class Scene:
    """A scheduler that waits, and the other ends of its channels."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.config: PipelineConfig = config_from_mapping({"mode": "sd", **settings})
        self.rundir = RunDir.create(folder, "r")
        log = logs.configure("scheduler", folder / "log.jsonl", "info", False)
        self.runtime = Runtime("scheduler", 0, self.config, self.rundir, log, StopFlag(), 1)
        self.group = Group()
        self.waiter = Waiter(self.runtime, cast(Any, self.group))
        self.planner = RoundPlanner(self.config.mode, self.config.speculation, None)
        self.times = RoundTimes()

    def message(self) -> StepResult | None:
        receiver = TypedReceiver.open(self.runtime, channels.RESULTS, StepResult)
        return self.waiter.message(receiver, "target-0", "step result", lambda r: r.step == 7)

    def greeted(self) -> DraftPort:
        """The draft's port, once the draft has answered."""
        port = DraftPort(self.runtime, SIZES, self.waiter, self.times)
        name = channels.draft_notices(0)
        self.notices: TypedSender[DraftNotice] = TypedSender.open(self.runtime, name, DraftNotice)
        self.notices.send(DraftTimes(1, 0, 0, 0, 0, 0, 0, 0, 40))
        port.greet(self.planner)
        assert port.usable
        return port

    def backup(self, port: DraftPort) -> list[int]:
        """The chain that a request without one gets."""
        request = request_of(0, [1, 2, 3], 9)
        assert port.backups(self.planner, {0: request}, {0: 2}, lambda: None)
        return request.chain


@pytest.fixture
def make(shm_dir: Path) -> Iterator[Callable[..., Scene]]:
    made: list[Scene] = []

    def scene(**settings: Any) -> Scene:
        made.append(Scene(shm_dir, **settings))
        return made[-1]

    yield scene
    for each in made:
        each.rundir.close()
    logs.close()


def test_a_pause_of_the_machine_is_no_delay_of_the_target(
    make: Callable[..., Scene], stand_still: Callable[[float], None]
) -> None:
    scene = make()
    sender = TypedSender.open(scene.runtime, channels.RESULTS, StepResult)
    scene.group.turns = [
        lambda: None,
        lambda: stand_still(HOUR),
        lambda: sender.send(StepResult(7, [], 0, 0, 0)),
    ]
    result = scene.message()
    assert result is not None
    assert result.step == 7


def test_a_target_that_never_answers_is_missed_by_name(
    make: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "STUCK", 0.3)
    with pytest.raises(PeerLost, match=r"^target-0: no step result within ") as caught:
        make().message()
    assert caught.value.peer == "target-0"


def test_a_pause_of_the_machine_is_no_delay_of_the_draft(
    make: Callable[..., Scene], stand_still: Callable[[float], None]
) -> None:
    scene = make()
    port = scene.greeted()
    scene.group.turns = [
        lambda: stand_still(HOUR),
        lambda: scene.notices.send(ChainReady(scene.planner.round, 0, [4, 5])),
    ]
    assert scene.backup(port) == [4, 5]
    assert (port.trouble, port.losses) == ("", 0)
    # Nor does it count for how long such a chain takes.
    assert scene.times.backup_wait_seconds < 10
    assert scene.planner.pace.times.time("backup_step") < 10


def test_a_draft_that_is_late_is_left_out(make: Callable[..., Scene]) -> None:
    scene = make(run={"beat_timeout": 1.0})
    port = scene.greeted()
    assert scene.backup(port) == []
    assert port.trouble == "draft: no backup chain within 0.5 s"


def test_a_draft_that_is_needed_and_late_is_missed_by_name(
    make: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("procs.draft_port.STUCK", 0.3)
    scene = make(run={"on_draft_failure": "fail"})
    port = scene.greeted()
    with pytest.raises(PeerLost, match=r"^draft: no backup chain within 0\.3 s$") as caught:
        scene.backup(port)
    assert caught.value.peer == "draft"
