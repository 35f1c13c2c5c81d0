"""What a model folder's files say that is read without torch: JSON, and where the weights are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ipc.errors import ModelError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "*.tiktoken",
)
"""Patterns: a folder that has none of them has no tokenizer."""


def check_tokenizer(folder: Path) -> None:
    """Raise ModelError if there is no tokenizer in a model folder; whether it can be read is not
    looked at."""
    if not any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES):
        raise ModelError(f"{folder}: no tokenizer: neither tokenizer.json nor any other is there")


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ModelError naming the file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file; is this a model folder?") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise ModelError(f"{path}: must hold a JSON object")
    return data


def weight_map(folder: Path) -> dict[str, str] | None:
    """Tensor name -> file name of a checkpoint that has an index; None for one that has none.

    Raises ModelError for an index that names no files.
    """
    index = folder / INDEX_FILE
    if not index.is_file():
        return None
    try:
        files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        found = {str(name): str(file) for name, file in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index}: not a safetensors index: {error!r}") from None
    if not found:
        raise ModelError(f"{index}: not a safetensors index: it names no weights")
    return found
