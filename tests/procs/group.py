"""Groups of real processes around runtime and hub, without models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from ssd_pipe.config import Mode, PipelineConfig, RunSection

MEMBERS = ("scheduler", "frontend", "target-0")


class Group:
    """Members of one run: scheduler, frontend, target, and outside mode "ar" a draft."""

    def __init__(self, folder: Path, shm_dir: Path, mode: Mode = "ar", **run: Any) -> None:
        section = RunSection(
            name="r",
            shm_dir=str(shm_dir),
            log_dir=str(folder / "logs"),
            **{"beat_timeout": 10.0, "ready_timeout": 60.0, **run},
        )
        self.config = PipelineConfig(mode=mode, run=section)
        self.names = MEMBERS if mode == "ar" else (*MEMBERS, "draft")
        self.folder = folder
        self.shm_dir = shm_dir
        self.members: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "config.json").write_bytes(msgspec.json.encode(self.config))

    def start(
        self, name: str, behaviour: str = "serve", key: str = "", **environment: str
    ) -> subprocess.Popen[bytes]:
        role, _, rank = name.partition("-")
        arguments = [role, behaviour, str(self.folder / "config.json"), rank or "0"]
        member = subprocess.Popen(
            [sys.executable, "-m", "tests.procs.member", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **environment},
        )
        self.members[key or name] = member
        return member

    def start_all(self, **behaviours: str) -> None:
        for name in self.names:
            self.start(name, behaviours.get(name.partition("-")[0], "serve"))

    def hear(self, name: str, what: str) -> dict[str, Any]:
        """The member's next report, which must be ``what``."""
        stdout = self.members[name].stdout
        assert stdout is not None
        line = stdout.readline()
        assert line, f"{name} ended: {self.members[name].communicate()}"
        told: dict[str, Any] = json.loads(line)
        assert told["what"] == what
        return told

    def until_ready(self) -> dict[str, dict[str, Any]]:
        self.hear("scheduler", "listening")
        return {name: self.hear(name, "ready") for name in self.names}

    def end(self, name: str, seconds: float = 20) -> tuple[int, str]:
        """Exit status and what the member wrote to stderr."""
        member = self.members[name]
        stderr = member.communicate(timeout=seconds)[1].decode()
        return member.returncode, stderr

    def log(self, name: str) -> list[dict[str, Any]]:
        text = (self.folder / "logs" / "r" / f"{name}.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]
