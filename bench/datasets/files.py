"""Records out of a data file: JSON Lines, JSON, CSV, Parquet; plain or gzipped."""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from ssd_pipe.errors import ConfigError

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")


def readable(path: Path) -> bool:
    """Whether the name says that ``read`` can read it."""
    return _suffix(path) in SUFFIXES


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The file's records in order, as far as they are asked for.

    Raises ConfigError naming the file: unreadable, or not in the format its name promises.
    """
    try:
        if _suffix(path) == ".parquet":
            yield from _parquet(path)
            return
        opened: Any = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rb") as file:
            if _suffix(path) == ".csv":
                yield from csv.DictReader(io.TextIOWrapper(file, encoding="utf-8-sig", newline=""))
            else:
                yield from _json(file)
    except (OSError, EOFError, UnicodeDecodeError, msgspec.MsgspecError) as error:
        raise ConfigError(str(path), f"cannot be read: {error}") from None


def _suffix(path: Path) -> str:
    return path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix


def _json(file: Any) -> Iterator[dict[str, Any]]:
    """One array, or an object a line; C4 calls files of the second kind ``.json`` too."""
    first = file.readline()
    if first.lstrip()[:1] == b"[":
        yield from msgspec.json.decode(first + file.read(), type=list[dict[str, Any]])
        return
    for line in (first, *file):
        if line.strip():
            yield msgspec.json.decode(line, type=dict[str, Any])


def _parquet(path: Path) -> Iterator[dict[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise ConfigError(
            str(path), "reading Parquet needs pyarrow: pip install 'ssd-pipe[datasets]'"
        ) from None
    try:
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=256):
            yield from batch.to_pylist()
    except ArrowException as error:
        raise ConfigError(str(path), f"cannot be read: {error}") from None
