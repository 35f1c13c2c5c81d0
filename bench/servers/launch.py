"""Command lines that start other engines' servers, and ours, for the same models and limits.

vLLM: ``vllm serve`` with ``--speculative-config`` (its docs, features/speculative_decoding);
SGLang: ``sglang.launch_server`` with the STANDALONE algorithm (advanced_features, "Standalone
Speculative Decoding"), whose chain of k tokens is k steps of one branch and k + 1 tokens to verify.
Neither reuses prefixes here, so that a prompt that comes again costs what it cost first.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import msgspec

from ssd_pipe.config import Mode, PipelineConfig
from ssd_pipe.errors import ConfigError
from ssd_pipe.owned_process import up_command

HOST = "127.0.0.1"
MODEL_NAME = "bench"
VLLM, SGLANG = ("vllm", "vllm-sd"), ("sglang", "sglang-sd")
OURS: dict[str, Mode] = {"ar-http": "ar", "sd-http": "sd", "ssd-http": "ssd"}
NAMES = (*VLLM, *SGLANG, *OURS)
PACKAGES = {"vllm": "vllm", "sglang": "sglang"}
DTYPES = {"auto": "auto", "float32": "float32", "bfloat16": "bfloat16"}


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """What a server is to serve.

    ``target`` and ``draft`` are folders; ``k`` draft tokens a round; ``max_model_len`` tokens of
    prompt and answer; ``seqs`` requests at once; ``seed`` of the server's own noise.
    """

    target: Path
    draft: Path
    k: int
    tp: int
    dtype: str
    max_model_len: int
    seqs: int
    seed: int


def check_installed(name: str) -> None:
    """Raises ConfigError for an engine whose package is not here."""
    package = PACKAGES.get(name.partition("-")[0])
    if package is not None and importlib.util.find_spec(package) is None:
        raise ConfigError(
            "--engines",
            f"{name}: {package} is not installed here; pip install {package}, "
            f"or name a server that runs: --server {name}=http://HOST:PORT",
        )


def command(name: str, served: Served, port: int) -> list[str]:
    """Command line of an engine's server on ``port``."""
    return vllm(name, served, port) if name in VLLM else sglang(name, served, port)


def vllm(name: str, served: Served, port: int) -> list[str]:
    """vLLM, plain ("vllm") or with a draft model ("vllm-sd")."""
    made = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(served.target)]
    made += ["--host", HOST, "--port", str(port), "--served-model-name", MODEL_NAME]
    made += ["--tensor-parallel-size", str(served.tp), "--dtype", DTYPES[served.dtype]]
    made += ["--max-model-len", str(served.max_model_len), "--max-num-seqs", str(served.seqs)]
    made += ["--seed", str(served.seed), "--no-enable-prefix-caching"]
    made += ["--generation-config", "vllm"]  # not the model's own temperature and top-p
    if name == "vllm-sd":
        speculation = {
            "method": "draft_model",
            "model": str(served.draft),
            "num_speculative_tokens": served.k,
        }
        made += ["--speculative-config", json.dumps(speculation)]
    return made


def sglang(name: str, served: Served, port: int) -> list[str]:
    """SGLang, plain ("sglang") or with a draft model ("sglang-sd")."""
    made = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(served.target)]
    made += ["--host", HOST, "--port", str(port), "--served-model-name", MODEL_NAME]
    made += ["--tp-size", str(served.tp), "--dtype", DTYPES[served.dtype]]
    made += ["--context-length", str(served.max_model_len)]
    made += ["--max-running-requests", str(served.seqs), "--random-seed", str(served.seed)]
    made += ["--disable-radix-cache", "--sampling-defaults", "openai", "--enable-metrics"]
    if name == "sglang-sd":
        made += ["--speculative-algorithm", "STANDALONE"]
        made += ["--speculative-draft-model-path", str(served.draft)]
        made += ["--speculative-num-steps", str(served.k), "--speculative-eagle-topk", "1"]
        made += ["--speculative-num-draft-tokens", str(served.k + 1)]
    return made


def own(config: PipelineConfig, port: int, folder: Path) -> list[str]:
    """Our pipeline with its gateway; ``folder`` takes its TOML file."""
    change = msgspec.structs.replace
    gateway = change(
        config.gateway, enabled=True, host=HOST, port=port, model_name=MODEL_NAME, api_key=""
    )
    return up_command(change(config, gateway=gateway), folder)
