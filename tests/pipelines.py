"""Help for tests that run the program: a byte-level model pair, a scratch /dev/shm."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.models.tiny import make_tiny

SPECIAL = ("<pad>", "<s>", "</s>")


def command(*arguments: str) -> list[str]:
    """Command line of ``ssd-pipe`` with this interpreter."""
    return [sys.executable, "-m", "ssd_pipe", *arguments]


def byte_model(folder: Path, name: str, seed: int = 0, **overrides: Any) -> Path:
    """A tiny random model whose tokens are the 256 bytes and three special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    settings = {"vocab_size": len(vocabulary), **overrides}
    made = make_tiny(folder, name=name, seed=seed, **settings)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(made / "tokenizer.json"))
    return made


@pytest.fixture
def shm_dir() -> Iterator[Path]:
    """A folder of its own in /dev/shm, short enough for sockets."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="t-") as folder:
        yield Path(folder)
