"""Compiles the kernels of this folder into a shared library in the user's cache folder."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from ipc.errors import ResourceError

HERE = Path(__file__).parent
# Contraction is off so that a * b + c means the same wherever the compiler inlines it.
FLAGS = ["-std=c++20", "-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno"]
TIMEOUT = 300.0
STALE = 3600.0  # seconds after which a build's folder is one that a killed build left


class NativeUnavailable(ResourceError):
    """The kernels cannot be compiled or loaded here; the text is one line saying why."""


def cache_folder() -> Path:
    """Where compiled kernels are kept: $XDG_CACHE_HOME/ssd-pipe/native or ~/.cache/..."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "ssd-pipe" / "native"


def built_library() -> Path:
    """Path of the compiled library for this machine, compiling it if it is not there yet.

    The name is a hash of sources, flags, compiler and CPU, so a stale or foreign one is never
    used. Of processes that start together one compiles (20 s of one core) and the others wait;
    the result is renamed into place whole. Raises NativeUnavailable.
    """
    compiler = find_compiler()
    target = _target(compiler)
    try:
        if target.exists():
            return target
        with _only_builder(target.parent):
            _remove_stale(target.parent)
            if not target.exists():
                with tempfile.TemporaryDirectory(prefix="build-", dir=target.parent) as folder:
                    _compile(compiler, Path(folder)).replace(target)
    except OSError as error:
        raise NativeUnavailable(f"native kernels: {error}") from error
    return target


def check_buildable() -> None:
    """Raise NativeUnavailable if ``built_library`` would, as far as that is known without building
    it and without leaving anything in the cache folder: a compiler that does not compile, a folder
    that cannot be written."""
    compiler = find_compiler()
    target = _target(compiler)
    try:
        if target.exists():
            return
        with tempfile.TemporaryDirectory(prefix="ssd-pipe-") as folder:
            probe = _probe_source(Path(folder))
            _run([*compiler, *FLAGS, "-shared", str(probe), "-o", f"{folder}/probe.so"])
            os.stat(f"{folder}/probe.so")
        place = target.parent
        while not place.exists():
            place = place.parent
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise NativeUnavailable(f"native kernels: {error}") from error


def _target(compiler: list[str]) -> Path:
    """Where the library is, or is to be. Raises NativeUnavailable for a compiler that does not say
    its version."""
    version = _run([*compiler, "--version"]).partition("\n")[0]
    digest = hashlib.blake2b(digest_size=10)
    for path in [*sorted(HERE.glob("*.cpp")), *sorted(HERE.glob("*.h"))]:
        digest.update(path.name.encode() + path.read_bytes())
    digest.update("\0".join([*compiler, version, *FLAGS, platform.machine(), _cpu()]).encode())
    return cache_folder() / f"{digest.hexdigest()}.so"


def _remove_stale(folder: Path) -> None:
    """Remove what killed builds left. The caller holds the lock."""
    for left in folder.glob("build-*"):
        if time.time() - left.stat().st_mtime > STALE:
            shutil.rmtree(left, ignore_errors=True)


@contextmanager
def _only_builder(folder: Path) -> Iterator[None]:
    """Held by one process at a time; the kernel lets go of it when that process dies."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def find_compiler() -> list[str]:
    """$CXX, else the first compiler that is there, as a command. Raises NativeUnavailable."""
    wanted = os.environ.get("CXX")
    for name in [wanted] if wanted else ["g++", "clang++", "c++"]:
        try:
            command = shlex.split(name)
        except ValueError as error:
            raise NativeUnavailable(f"native kernels: CXX={wanted!r}: {error}") from None
        if command and shutil.which(command[0]):
            return command
    what = f"CXX={wanted!r} was not found" if wanted else "no g++, clang++ or c++ was found"
    raise NativeUnavailable(f"native kernels: {what}")


def _compile(compiler: list[str], folder: Path) -> Path:
    """Object by object, in parallel; without OpenMP or -march=native where that fails."""
    flags = [*FLAGS, *[f for f in ("-march=native", "-fopenmp") if _accepts(compiler, f, folder)]]
    sources = sorted(HERE.glob("*.cpp"))
    objects = [folder / f"{path.stem}.o" for path in sources]

    def compile_one(pair: tuple[Path, Path]) -> None:
        _run([*compiler, *flags, "-c", str(pair[0]), "-o", str(pair[1])])

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(compile_one, zip(sources, objects, strict=True)))
    result = folder / "kernels.so"
    _run([*compiler, *flags, "-shared", *map(str, objects), "-o", str(result)])
    return result


def _accepts(compiler: list[str], flag: str, folder: Path) -> bool:
    probe = _probe_source(folder)
    command = [*compiler, flag, "-fPIC", "-shared", str(probe), "-o", str(folder / "probe.so")]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _probe_source(folder: Path) -> Path:
    probe = folder / "probe.cpp"
    probe.write_text(
        '#include <cmath>\nextern "C" double probe(double x) { return std::exp(x); }\n'
    )
    return probe


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"native kernels: {command[0]}: {error}") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line.lower()]
        reason = lines[0] if lines else f"exit status {done.returncode}"
        raise NativeUnavailable(f"native kernels: {command[0]} failed: {reason}")
    return done.stdout


def _cpu() -> str:
    """What -march=native depends on: the CPU's model and features."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return platform.processor()
    first = text.split("\n\n")[0].splitlines()
    wanted = ("model name", "model\t", "flags", "Features", "CPU implementer", "CPU part")
    return "\n".join(line for line in first if line.startswith(wanted))
