"""Shared-memory files in the run directory.

Space is taken when a segment is made, so a full file system is an error at start-up and not a
SIGBUS in the middle of a run.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from ipc.errors import ResourceError

if TYPE_CHECKING:  # imported where it is used: rings need no NumPy, and start faster without
    import numpy as np
    import numpy.typing as npt


class Segment:
    """A mapped shared-memory file.

    Attributes:
        path: the file.
        map: its bytes, shared and writable.
    """

    def __init__(self, path: Path, mapping: mmap.mmap) -> None:
        self.path = path
        self.map = mapping

    @classmethod
    def create(cls, path: Path, nbytes: int) -> Segment:
        """Make a zeroed segment. Raises ResourceError if it exists or memory is short."""
        fd = _new_file(path, nbytes)
        try:
            return cls(path, mmap.mmap(fd, nbytes))
        finally:
            os.close(fd)

    @classmethod
    def open(cls, path: Path) -> Segment:
        """Map an existing segment whole. Raises ResourceError if there is none."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ResourceError(f"{path}: {error.strerror}") from None
        try:
            return cls(path, mmap.mmap(fd, 0))
        except ValueError:
            raise ResourceError(f"{path}: empty segment") from None
        finally:
            os.close(fd)

    @classmethod
    def create_or_open(cls, path: Path, content: bytes, nbytes: int) -> Segment:
        """Map the segment, made if missing with ``content`` at its start; any side may come first.

        Raises ResourceError if memory is short, or the segment there has another size.
        """
        fresh = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
        fd = _new_file(fresh, nbytes)
        try:
            os.pwrite(fd, content, 0)
            # A hard link appears with its content and fails if the name is taken.
            with contextlib.suppress(FileExistsError):
                os.link(fresh, path)
        finally:
            os.close(fd)
            fresh.unlink()
        segment = cls.open(path)
        if (size := len(segment.map)) != nbytes:
            segment.close()
            raise ResourceError(f"{path}: segment of {size} bytes, expected {nbytes}")
        return segment

    def close(self) -> None:
        """Unmap now, or when the last array that still looks into the segment goes."""
        with contextlib.suppress(BufferError):
            self.map.close()


def create_segment(path: Path, nbytes: int) -> npt.NDArray[np.uint8]:
    """Make a zeroed segment as uint8 [nbytes]; it stays mapped as long as the array lives.

    Raises ResourceError if it exists or memory is short.
    """
    import numpy as np

    return np.frombuffer(Segment.create(path, nbytes).map, np.uint8)


def create_or_open_segment(path: Path, nbytes: int) -> npt.NDArray[np.uint8]:
    """The segment as uint8 [nbytes], made (zeroed) if missing; else with what it holds.

    So a process that comes in the place of another one writes where its readers still look.
    Raises ResourceError if memory is short, or the segment there has another size.
    """
    import numpy as np

    return np.frombuffer(Segment.create_or_open(path, b"", nbytes).map, np.uint8)


def open_segment(path: Path, nbytes: int) -> npt.NDArray[np.uint8]:
    """An existing segment as uint8 [nbytes].

    Raises ResourceError if there is none or it has another size.
    """
    import numpy as np

    segment = Segment.open(path)
    if len(segment.map) != nbytes:
        raise ResourceError(f"{path}: segment of {len(segment.map)} bytes, expected {nbytes}")
    return np.frombuffer(segment.map, np.uint8)


def _new_file(path: Path, nbytes: int) -> int:
    """Make a file of ``nbytes`` with its space reserved; returns its descriptor."""
    if nbytes <= 0:
        raise ResourceError(f"{path}: a segment needs at least one byte, got {nbytes}")
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ResourceError(f"{path}: {error.strerror}") from None
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        os.close(fd)
        path.unlink(missing_ok=True)
        short = error.errno in {errno.ENOSPC, errno.EFBIG, errno.ENOMEM}
        reason = f"not enough shared memory for {nbytes} bytes" if short else error.strerror
        raise ResourceError(f"{path}: {reason}") from None
    return fd
