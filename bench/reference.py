"""transformers' greedy tokens, computed once per model and kept in a file."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from bench.transformers_engine import TransformersEngine
from bench.transformers_worker import Job
from ssd_pipe.hub import cache_dir
from ssd_pipe.params import SamplingParams

WEIGHT_FILES = ("*.safetensors", "config.json")
SAVE_EVERY = 10
VERSION = 1


class Reference(msgspec.Struct, kw_only=True):
    """Greedy tokens after one prompt, end-of-sequence ignored.

    ``gaps``: best minus second best logit at each of them; a tiny one is a near tie, which another
    order of summation may decide the other way.
    """

    tokens: list[int]
    gaps: list[float]


def model_hash(folder: Path) -> str:
    """Hash over a model folder's weights and shape."""
    digest = hashlib.blake2b(digest_size=12)
    for pattern in WEIGHT_FILES:
        for path in sorted(folder.glob(pattern)):
            digest.update(path.name.encode())
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def greedy(
    folder: Path,
    prompts: Sequence[Sequence[int]],
    count: int,
    threads: int,
    advance: Callable[[str], None],
) -> list[Reference]:
    """``count`` tokens after each prompt, in float32; what the file has is not computed again."""
    path = cache_file(folder)
    known = _read(path)
    keys = [prompt_key(tokens, count) for tokens in prompts]
    missing = [i for i, key in enumerate(keys) if key not in known]
    if missing:
        engine = TransformersEngine("transformers", folder, threads=threads)
        params = SamplingParams(max_tokens=count, ignore_eos=True)
        try:
            engine.start()
            engine.wait_ready()
            for done, i in enumerate(missing, 1):
                advance("reference: transformers")
                output = engine.run(Job(tokens=list(prompts[i]), params=params, gaps=True))
                known[keys[i]] = Reference(tokens=output.answer.tokens, gaps=output.gaps)
                if done % SAVE_EVERY == 0:
                    _write(path, known)
        finally:
            engine.stop()
            _write(path, known)
    return [known[key] for key in keys]


def cache_file(folder: Path) -> Path:
    """Where the tokens of a model are kept; another transformers or torch is another file."""
    versions = [importlib.metadata.version(name) for name in ("transformers", "torch")]
    name = "-".join(["greedy", model_hash(folder), *versions, f"v{VERSION}"])
    return cache_dir() / "bench" / f"{name}.json"


def prompt_key(tokens: Sequence[int], count: int) -> str:
    """What ``count`` tokens after a prompt are kept under."""
    text = ",".join(map(str, tokens)) + f"|{count}"
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def _read(path: Path) -> dict[str, Reference]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Reference])
    except (OSError, msgspec.MsgspecError):
        return {}  # not there, or not whole: it is computed again


def _write(path: Path, known: dict[str, Reference]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}-{os.getpid()}")
    fresh.write_bytes(msgspec.json.encode(known))
    fresh.rename(path)
