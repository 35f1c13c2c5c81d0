"""One running pipeline for all commands that look at one or talk with one."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ssd_pipe.client import Client
from ssd_pipe.config_load import load
from ssd_pipe.params import SamplingParams
from ssd_pipe.supervisor import Supervisor
from ssd_pipe.trace.kernels import SUFFIX
from tests.frontend_peer import TEMPLATE
from tests.models.tiny import perturbed
from tests.pipelines import byte_model
from tests.waiting import wait_for

PROFILED = 4


class Running:
    """A pipeline whose draft is a noisy copy of its target: it hits, and misses.

    Attributes:
        url: of its OpenAI-compatible gateway.
    """

    def __init__(self, supervisor: Supervisor, client: Client, shm_dir: str, url: str) -> None:
        self.supervisor = supervisor
        self.client = client
        self.shm_dir = shm_dir
        self.url = url

    @property
    def place(self) -> list[str]:
        """Options by which a command finds it."""
        return ["--run", self.supervisor.config.run.name, "--shm-dir", self.shm_dir]

    def work(self, tokens: int = 60) -> None:
        """Two requests at once, then one alone."""
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        with ThreadPoolExecutor(2) as pool:
            for _ in pool.map(lambda text: self.client.generate(text, params), ("x = [1", "def")):
                pass
        self.client.generate("the end", params)


@pytest.fixture(scope="package")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("running")
    target = byte_model(folder, "target", seed=1)
    (target / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    draft = perturbed(target, folder / "draft", 0.1)
    ready_file = folder / "ready.json"
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="t-") as shm_dir:
        settings = {
            "target.model": str(target),
            "draft.model": str(draft),
            "target.threads": 1,
            "draft.threads": 1,
            # Rounds must happen however little they pay with models this small.
            "speculation.backup": "jit",
            "speculation.adaptive": False,
            "run.shm_dir": shm_dir,
            "run.log_dir": str(folder / "logs"),
            "run.torch_profiler": PROFILED,
            "gateway.enabled": True,
            "gateway.port": 0,
        }
        with (
            Supervisor(load(None, settings), ready_file=ready_file) as supervisor,
            Client(supervisor.endpoint) as client,
        ):
            url = json.loads(ready_file.read_text())["http"]
            yield Running(supervisor, client, shm_dir, url)


@pytest.fixture(scope="package")
def logs(running: Running) -> Path:
    """The log folder of the pipeline, after some work."""
    running.work()
    folder = running.supervisor.log_dir
    recordings = [folder / f"{name}{SUFFIX}" for name in ("target-0", "draft")]
    wait_for(lambda: all(path.exists() for path in recordings))
    return folder
