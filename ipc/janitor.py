"""Removes a run directory after every process of the run is gone, however it went.

``spawn`` starts one tiny detached process that waits for the run's lock and then removes the
directory. It survives ``kill -9`` of the whole group because it belongs to no process group and
to no parent of the run. Run as a script, this module is that process where ``flock(1)`` is missing.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
import subprocess
import sys

# The lock file's inode is compared before anything is removed: a later run of the same name may
# have taken the path while this process slept on the earlier run's lock. The rename comes first so
# that the name is free in one step and a half-removed directory is never mistaken for a run.
# Whoever was killed while it removed the directory has left it under a name of its own, so the
# janitor clears every directory with the prefix $2: all of them are on their way out.
# A background list gets /dev/null as its stdin, so the lock moves to descriptor 3.
_SHELL = """exec 3<&0
(
  flock -x 3 || exit 1
  [ "$1/.lock" -ef /proc/self/fd/3 ] && mv -- "$1" "$2$$"
  rm -rf -- "$2"*
) &"""


def spawn(run: str, grave: str, lock_file: str) -> None:
    """Start the janitor of the run directory ``run``.

    ``grave``: the path that names of directories to be removed begin with. The caller holds its
    shared lock already. Raises OSError if no process can be started.
    """
    command = (
        ["/bin/sh", "-c", _SHELL, "ssd-pipe-janitor", run, grave]
        if shutil.which("flock")
        else [sys.executable, "-I", "-S", __file__, run, grave]
    )
    fd = os.open(lock_file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # The child forks the janitor and exits at once, so no zombie and no child is left here.
        subprocess.run(
            command,
            stdin=fd,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
            check=False,
        )
    finally:
        os.close(fd)


def _watch(run: str, grave: str) -> None:
    """Wait for the lock on descriptor 0, then remove ``run`` if the lock is still its own."""
    fcntl.flock(0, fcntl.LOCK_EX)
    with contextlib.suppress(OSError):
        if os.path.samestat(os.fstat(0), os.stat(os.path.join(run, ".lock"))):
            os.rename(run, f"{grave}{os.getpid()}")
    for path in glob.glob(f"{glob.escape(grave)}*"):
        shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__" and os.fork() == 0:
    _watch(*sys.argv[1:])
