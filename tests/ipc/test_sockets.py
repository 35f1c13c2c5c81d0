from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest
import zmq

from ipc import sockets
from ssd_pipe.errors import ResourceError


def test_socket_files_are_owner_only(shm_dir: Path) -> None:
    before = os.umask(0o022)
    os.umask(before)
    bound = sockets.bind(zmq.PULL, f"ipc://{shm_dir}/s")
    assert stat.S_IMODE(os.stat(shm_dir / "s").st_mode) & 0o077 == 0
    assert os.umask(before) == before
    assert bound.getsockopt(zmq.LINGER) == 0
    bound.close()


def test_address_in_use_is_named(shm_dir: Path) -> None:
    first = sockets.bind(zmq.PULL, f"ipc://{shm_dir}/s")
    with pytest.raises(ResourceError, match=r"/s: address in use"):
        sockets.bind(zmq.PULL, f"ipc://{shm_dir}/s")
    push = sockets.connect(zmq.PUSH, f"ipc://{shm_dir}/s")
    push.send(b"still there")
    assert first.recv() == b"still there"
    tcp = sockets.bind(zmq.PULL, "tcp://127.0.0.1:0")
    with pytest.raises(ResourceError, match=r"tcp://127\.0\.0\.1:\d+: address in use"):
        sockets.bind(zmq.PULL, sockets.address(tcp))
    for sock in (first, push, tcp):
        sock.close()


def test_a_stale_socket_file_is_replaced(shm_dir: Path) -> None:
    left_over = socket.socket(socket.AF_UNIX)
    left_over.bind(str(shm_dir / "s"))
    left_over.close()
    bound = sockets.bind(zmq.PULL, f"ipc://{shm_dir}/s")
    push = sockets.connect(zmq.PUSH, f"ipc://{shm_dir}/s")
    push.send(b"x")
    assert bound.recv() == b"x"
    bound.close()
    push.close()


@pytest.mark.parametrize("endpoint", ["nonsense", "tcp://host", "ipc:///nonexistent/dir/s"])
def test_bad_addresses_are_named(endpoint: str) -> None:
    with pytest.raises(ResourceError, match=endpoint):
        sockets.bind(zmq.PULL, endpoint)


def test_a_file_that_is_no_socket_is_kept(shm_dir: Path) -> None:
    (shm_dir / "data").write_text("precious")
    with pytest.raises(ResourceError, match="data: not a socket"):
        sockets.bind(zmq.PULL, f"ipc://{shm_dir}/data")
    assert (shm_dir / "data").read_text() == "precious"
