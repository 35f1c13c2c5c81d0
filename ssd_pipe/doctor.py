"""What this machine has for a pipeline, and what it lacks. Nothing here changes anything."""

from __future__ import annotations

import os
import resource
import shlex
import shutil
import subprocess
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import psutil
from rich.console import Console
from rich.table import Table

from ipc import filesystem, probe
from ipc.rundir import list_runs
from models.native.build import (
    NativeUnavailable,
    cache_folder,
    check_buildable,
    find_compiler,
)
from ssd_pipe import device_report, hub
from ssd_pipe.config import PipelineConfig
from ssd_pipe.errors import ModelError, ResourceError
from ssd_pipe.footprint import expected_bytes
from ssd_pipe.gpu_count import usable_gpus
from ssd_pipe.leased_rounds import describe
from ssd_pipe.preflight import tokenizer_mismatch
from ssd_pipe.threads import available_cores

CPU_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_tile")
ARM_FLAGS = ("asimd", "bf16", "sve", "i8mm")
LIBRARIES = (
    "torch",
    "transformers",
    "pyzmq",
    "msgspec",
    "safetensors",
    "gguf",
    "flashinfer-python",
)
MIB = 1 << 20


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Sections of facts, and ``missing``: what to do, one line each; empty if all is well."""

    machine: dict[str, Any]
    shared_memory: dict[str, Any]
    limits: dict[str, Any]
    software: dict[str, Any]
    gpus: dict[str, Any]
    transports: dict[str, Any]
    device_transports: dict[str, Any]
    models: dict[str, Any]
    runs: dict[str, Any]
    missing: list[str]


def examine(config: PipelineConfig) -> Report:
    """Look at everything a run with ``config`` would need."""
    shared, models = _shared_memory(config), _models(config)
    software = _software()
    missing = [*models.pop("missing")]
    if shared["free_mib"] < shared["needed_mib"]:
        missing.append(
            f"{config.run.shm_dir}: {shared['free_mib']} MiB free, a run needs "
            f"{shared['needed_mib']} MiB"
        )
    if warning := filesystem.disk_warning(config.run.shm_dir):
        missing.append(f"a tmpfs for shared memory; {warning}")
    if reason := _native_obstacle():
        missing.append(f"compiled CPU kernels (plain torch is several times slower): {reason}")
    return Report(
        machine=_machine(),
        shared_memory=shared,
        limits=_limits(),
        software=software,
        gpus=_gpus(),
        transports=_transports(config) | {"rounds": describe(config)},
        device_transports=dict(device_report.describe(config.run.shm_dir)),
        models=models,
        runs=_runs(config),
        missing=missing,
    )


def render(report: Report, console: Console) -> None:
    """Print the report as a table, then what is missing."""
    table = Table(show_header=False, box=None, pad_edge=False)
    for section, facts in msgspec.structs.asdict(report).items():
        if section == "missing":
            continue
        title = section.replace("_", " ")
        for name, value in facts.items() or {"none": ""}.items():
            table.add_row(f"[bold]{title}[/]", name.replace("_", " "), _text(value))
            title = ""
    console.print(table)
    for line in report.missing:
        console.print(f"[yellow]missing:[/] {line}", highlight=False)
    if not report.missing:
        console.print("[green]nothing is missing[/]")


def _machine() -> dict[str, Any]:
    memory = psutil.virtual_memory()
    return {
        "cpu": _cpu_name(),
        "cores_here": len(available_cores()),
        "cores_physical": psutil.cpu_count(logical=False),
        "cores_logical": os.cpu_count(),
        "cpu_flags": _cpu_flags(),
        "memory_mib": memory.total // MIB,
        "memory_free_mib": memory.available // MIB,
        "kernel": os.uname().release,
        "python": sys.version.split()[0],
    }


def _cpuinfo(*keys: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in keys:
            return value.strip()
    return ""


def _cpu_name() -> str:
    return _cpuinfo("model name", "Hardware") or os.uname().machine


def _cpu_flags() -> list[str]:
    present = set(_cpuinfo("flags", "Features").split())
    return [flag for flag in CPU_FLAGS + ARM_FLAGS if flag in present]


def _shared_memory(config: PipelineConfig) -> dict[str, Any]:
    needed, assumed = expected_bytes(config)
    facts: dict[str, Any] = {
        "folder": config.run.shm_dir,
        "file_system": filesystem.kind_of(config.run.shm_dir),
        "needed_mib": needed // MIB,
        "needed_assumes": assumed,
    }
    try:
        usage = shutil.disk_usage(config.run.shm_dir)
    except OSError as error:
        return facts | {"size_mib": 0, "free_mib": 0, "writable": False, "error": error.strerror}
    return facts | {
        "size_mib": usage.total // MIB,
        "free_mib": usage.free // MIB,
        "writable": os.access(config.run.shm_dir, os.W_OK | os.X_OK),
    }


def _limits() -> dict[str, Any]:
    def limit(kind: int) -> str:
        return " / ".join(
            "unlimited" if value == resource.RLIM_INFINITY else str(value)
            for value in resource.getrlimit(kind)
        )

    return {
        "open_files": limit(resource.RLIMIT_NOFILE),
        "locked_memory_bytes": limit(resource.RLIMIT_MEMLOCK),
        "processes": limit(resource.RLIMIT_NPROC),
    }


def _software() -> dict[str, Any]:
    versions: dict[str, str | None] = {}
    for name in LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    try:
        compiler = shlex.join(find_compiler())
    except NativeUnavailable:
        compiler = ""
    return {"compiler": compiler, "kernels_folder": str(cache_folder()), **versions}


def _native_obstacle() -> str:
    """Why the CPU kernels cannot be built here; empty if they can, or have been."""
    try:
        check_buildable()
    except NativeUnavailable as error:
        return str(error).removeprefix("native kernels: ")
    return ""


def _gpus() -> dict[str, Any]:
    """Devices and peer access as torch sees them; the driver's own list if torch sees none."""
    count = usable_gpus()
    listed = [] if count else _nvidia_smi()
    if not (count or listed):
        return {"devices": []}
    import torch

    if not count:
        why = "this torch has no CUDA" if torch.version.cuda is None else "torch cannot use them"
        return {"devices": listed, "usable": False, "why": why}
    devices = [
        f"cuda:{i} {torch.cuda.get_device_name(i)}, "
        f"{torch.cuda.get_device_properties(i).total_memory // MIB} MiB"
        for i in range(count)
    ]
    peers = [
        f"{a}->{b}"
        for a in range(count)
        for b in range(count)
        if a != b and torch.cuda.can_device_access_peer(a, b)
    ]
    return {"devices": devices, "usable": True, "peer_access": peers}


def _nvidia_smi() -> list[str]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        done = subprocess.run(
            [tool, "--query-gpu=name,memory.total", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def _models(config: PipelineConfig) -> dict[str, Any]:
    facts: dict[str, Any] = {"missing": []}
    names = dict.fromkeys([*hub.BUILT_IN, config.target.model, config.draft.model])
    for name in names:
        try:
            facts[name] = str(hub.resolve(name))
        except ModelError as error:
            facts[name] = "missing"
            facts["missing"].append(str(error))
    with suppress(ModelError):  # told above
        if mismatch := tokenizer_mismatch(config):
            facts["missing"].append(f"a draft with the target's tokenizer: {mismatch}")
    return facts


def _runs(config: PipelineConfig) -> dict[str, Any]:
    """Live runs of this user, and directories that crashed runs left (the next start removes)."""
    try:
        live = list_runs(config.run.shm_dir)
    except ResourceError as error:
        return {"error": str(error)}
    base = Path(config.run.shm_dir) / f"ssd-pipe-{os.getuid()}"
    found = [p.name for p in base.iterdir() if p.is_dir() and not p.name.startswith(".")]
    return {"live": live, "stale": sorted(set(found) - set(live))}


def _transports(config: PipelineConfig) -> dict[str, Any]:
    """What the start-up probe finds, on a scratch run directory."""
    return dict(probe.describe(config.run.shm_dir))


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None or value == "" else str(value)
