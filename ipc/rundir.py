"""The run directory: everything that processes of one run share on one machine.

``<shm_dir>/ssd-pipe-<uid>/<name>/`` holds sockets, doorbells, shared memory and ``config.json``.
Every process of the run holds a shared lock on ``.lock``; a run is alive as long as someone does.
The last one out removes the directory; after a crash of everyone the janitor does.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import stat
import time
from pathlib import Path
from types import TracebackType

from ipc import janitor, runlock
from ipc.errors import ConfigError, ResourceError
from ipc.run_files import SOCKET_PATH_LIMIT, RunFiles

SOCKET_NAME_ROOM = 28  # bytes kept for "/<name>.sock"
OWNED = "llm-"  # prefix of runs that a program has for itself
_NEW = ".new-"
_MIB = 1 << 20


class RunDir(RunFiles):
    """One process's hold on a run directory. A context manager; ``close`` releases the hold.

    Attributes:
        created: True in the process that made the directory.
    """

    def __init__(self, path: Path, lock_fd: int, created: bool) -> None:
        super().__init__(path)
        self.created = created
        self._lock_fd = lock_fd
        self._owner = os.getpid()

    @classmethod
    def create(cls, shm_dir: str | Path, name: str = "", need_bytes: int = 0) -> RunDir:
        """Make and hold a new run directory.

        Args:
            shm_dir: file system of the directory, normally /dev/shm.
            name: the run's name; empty = a fresh unique one.
            need_bytes: shared memory the run is going to allocate.

        Raises:
            ConfigError: the name is not usable as a file name.
            ResourceError: ``shm_dir`` is missing or too full, the path is too long for sockets,
                or a run of this name is alive.
        """
        base = _base(shm_dir)
        name = name or f"run-{secrets.token_hex(4)}"
        path = base / _checked(name)
        room = SOCKET_PATH_LIMIT - SOCKET_NAME_ROOM
        if len(os.fsencode(path)) > room:
            raise ResourceError(
                f"{path}: too long for unix sockets; shm_dir and run name together may have "
                f"{room} bytes, got {len(os.fsencode(path))}"
            )
        cls.sweep(shm_dir)
        free = _free_bytes(base)
        if free < need_bytes:
            raise ResourceError(
                f"{shm_dir}: not enough shared memory: {-(-need_bytes // _MIB)} MiB needed, "
                f"{free // _MIB} MiB available"
            )
        # Made under another name and locked before it gets its own, so that nobody ever sees this
        # run without a holder. rename() cannot replace a directory that is not empty.
        fresh = base / f"{_NEW}{secrets.token_hex(8)}"
        run = cls._make(fresh)
        try:
            _claim(fresh, path)
            run.name, run.path = name, path
            janitor.spawn(str(path), str(base / runlock.GONE), str(path / runlock.LOCK))
        except OSError as error:
            run.close()
            raise ResourceError(f"{path}: {error.strerror}") from None
        except BaseException:
            run.close()
            raise
        return run

    @classmethod
    def _make(cls, path: Path) -> RunDir:
        try:
            path.mkdir(mode=0o700)
            lock_fd = os.open(path / runlock.LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ResourceError(f"{path}: {error.strerror}") from None
        fcntl.flock(lock_fd, fcntl.LOCK_SH)
        return cls(path, lock_fd, created=True)

    @classmethod
    def open(cls, shm_dir: str | Path, name: str = "") -> RunDir:
        """Join a live run; an empty name means the only one there is.

        Raises ResourceError if there is no such run, or several and no name.
        """
        path = find_run(shm_dir, name)
        deadline = time.monotonic() + runlock.SETTLE
        while (fd := runlock.open_lock(path)) is not None:
            if not runlock.held(fd):
                os.close(fd)
                break
            if runlock.try_lock(fd, fcntl.LOCK_SH) and runlock.is_lock_of(fd, path):
                return cls(path, fd, created=False)
            os.close(fd)  # a look or a removal by somebody else is under way
            if time.monotonic() > deadline:
                break
            time.sleep(0.002)
        raise ResourceError(f"no run {path.name!r} in {path.parent}")

    @classmethod
    def create_or_open(cls, shm_dir: str | Path, name: str, need_bytes: int = 0) -> RunDir:
        """Join the run of this name, or make it if it is not alive. Any process may come first."""
        if not name:
            return cls.create(shm_dir, name, need_bytes)
        deadline = time.monotonic() + runlock.SETTLE
        while True:
            try:
                return cls.open(shm_dir, name)
            except ResourceError:
                pass
            try:
                return cls.create(shm_dir, name, need_bytes)
            except RunInUse:
                if time.monotonic() > deadline:
                    raise

    @staticmethod
    def sweep(shm_dir: str | Path) -> list[str]:
        """Remove this user's run directories that nobody holds; returns their names."""
        base = _base(shm_dir)
        removed = []
        for path in base.iterdir():
            if path.name.startswith(runlock.GONE):
                shutil.rmtree(path, ignore_errors=True)
                continue
            if path.name.startswith(_NEW) and _age(path) < runlock.SETTLE:
                continue
            if runlock.remove_if_dead(path):
                removed.append(path.name)
        return sorted(removed)

    def wipe(self) -> None:
        """Remove what ended processes of the run left behind; no other one may be alive."""
        for path in self.path.iterdir():
            if path not in self.kept:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def close(self) -> None:
        """Let go; remove the directory if this was the last hold. Idempotent."""
        fd, self._lock_fd = self._lock_fd, -1
        if fd < 0:
            return
        try:
            # A forked child shares this lock with its parent and must not change it.
            if self._owner == os.getpid():
                if runlock.try_lock(fd, fcntl.LOCK_EX):
                    runlock.remove(fd, self.path)
                elif not runlock.try_lock(fd, fcntl.LOCK_SH):
                    runlock.await_removal(fd, self.path)
        finally:
            os.close(fd)

    def __enter__(self) -> RunDir:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class RunInUse(ResourceError):
    """A live run already has this name."""


def list_runs(shm_dir: str | Path) -> list[str]:
    """Names of this user's live runs, sorted."""
    names = []
    for path in _base(shm_dir).iterdir():
        if path.name.startswith("."):
            continue
        fd = runlock.open_lock(path)
        if fd is not None:
            if runlock.held(fd):
                names.append(path.name)
            os.close(fd)
    return sorted(names)


def find_run(shm_dir: str | Path, name: str = "", *, owned: bool = True) -> Path:
    """Directory of a live run without holding it, for clients.

    Empty name: the only live run that no program has for itself, else, with ``owned``, the only
    one there is. Raises ResourceError if there is none, or several and no name.
    """
    base = _base(shm_dir)
    if name:
        path = base / _checked(name)
        if not path.is_dir():
            raise ResourceError(f"no run {name!r} in {base}")
        return path
    every = list_runs(shm_dir)
    names = [name for name in every if not name.startswith(OWNED)] or (every if owned else [])
    if len(names) == 1:
        return base / names[0]
    found = "no run"
    if names:
        found = f"several runs, name one: {', '.join(names)}"
    elif every:
        found = f"no run but those that programs have for themselves: {', '.join(every)}"
    raise ResourceError(f"{base}: {found}")


def _checked(name: str) -> str:
    if name.startswith(".") or "/" in name or "\0" in name:
        raise ConfigError("run.name", f"must not start with '.' nor contain '/', got {name!r}")
    return name


def _base(shm_dir: str | Path) -> Path:
    """This user's folder, made if missing; refused if anyone else could reach into it."""
    base = Path(shm_dir).absolute() / f"ssd-pipe-{os.getuid()}"
    try:
        base.mkdir(mode=0o700, exist_ok=True)
        info = base.lstat()
    except OSError as error:
        raise ResourceError(f"{base}: {error.strerror}") from None
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise ResourceError(f"{base}: must be a directory of mode 0700 owned by this user")
    return base


def _free_bytes(path: Path) -> int:
    info = os.statvfs(path)
    return info.f_bavail * info.f_frsize


def _claim(fresh: Path, path: Path) -> None:
    """Give ``fresh`` its name. Raises RunInUse if a live run has it."""
    deadline = time.monotonic() + runlock.SETTLE
    while True:
        try:
            fresh.rename(path)
            return
        except OSError:
            if not path.is_dir():
                raise
        if runlock.remove_if_dead(path):
            continue
        fd = runlock.open_lock(path)
        if fd is None:
            continue
        shared = runlock.try_lock(fd, fcntl.LOCK_SH)
        os.close(fd)
        if shared or time.monotonic() > deadline:
            raise RunInUse(f"a run named {path.name!r} is already up: {path} is in use")
        time.sleep(0.002)  # somebody is removing it


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0
