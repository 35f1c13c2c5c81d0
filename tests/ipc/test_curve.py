from __future__ import annotations

import stat
from pathlib import Path

import pytest
import zmq

from ipc import curve, sockets
from ssd_pipe.errors import ResourceError


@pytest.mark.parametrize(
    ("endpoint", "exposed"),
    [
        ("ipc:///tmp/s", False),
        ("inproc://x", False),
        ("nonsense", False),
        ("tcp://127.0.0.1:5", False),
        ("tcp://127.9.9.9:*", False),
        ("tcp://[::1]:5", False),
        ("tcp://localhost:5", False),
        ("tcp://lo:5", False),
        ("tcp://10.0.0.1:9;127.0.0.1:5", False),
        ("tcp://127.0.0.1:9;10.0.0.1:5", True),
        ("tcp://0.0.0.0:5", True),
        ("tcp://*:5", True),
        ("tcp://[::]:5", True),
        ("tcp://10.1.2.3:5", True),
        ("tcp://eth0:5", True),
        ("tcp://localhost.example.org:5", True),
        ("ws://127.0.0.1.example.org:5", True),
    ],
)
def test_what_other_machines_reach_is_told_from_what_they_do_not(
    endpoint: str, exposed: bool
) -> None:
    assert curve.is_exposed(endpoint) == exposed


@pytest.mark.parametrize("kind", [zmq.PULL, zmq.ROUTER])
def test_no_socket_is_exposed_without_keys(kind: int) -> None:
    with pytest.raises(ResourceError, match=r"tcp://0\.0\.0\.0:\*.*CURVE"):
        sockets.bind(kind, "tcp://0.0.0.0:*")
    with pytest.raises(ResourceError, match=r"tcp://10\.0\.0\.1:5.*CURVE"):
        sockets.connect(zmq.PUSH, "tcp://10.0.0.1:5")


def test_a_pair_is_written_once_and_for_its_owner(tmp_path: Path) -> None:
    public, secret = curve.make_pair(tmp_path / "keys" / "server")
    assert (public.name, secret.name) == ("server.key", "server.key_secret")
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    pair = curve.load_pair(secret)
    assert curve.client_keys(str(public)).server == pair.public
    assert curve.client_keys(pair.public.decode()).server == pair.public
    assert pair.secret.decode() not in repr(pair)
    before = secret.read_bytes()
    with pytest.raises(ResourceError, match=r"server\.key: exists already"):
        curve.make_pair(tmp_path / "keys" / "server")
    assert secret.read_bytes() == before


def test_files_that_are_not_usable_are_named(tmp_path: Path) -> None:
    public, secret = curve.make_pair(tmp_path / "server")
    with pytest.raises(ResourceError, match=r"server\.key: has no secret key"):
        curve.load_pair(public)
    secret.chmod(0o640)
    with pytest.raises(ResourceError, match=r"server\.key_secret: other users may read"):
        curve.load_pair(secret)
    with pytest.raises(ResourceError, match=r"gone: no such file"):
        curve.load_pair(tmp_path / "gone")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ResourceError, match=r"text: no certificate"):
        curve.client_keys(str(tmp_path / "text"))
    (tmp_path / "short").write_text('public-key = "abc"')
    with pytest.raises(ResourceError, match=r"short: not a key"):
        curve.client_keys(str(tmp_path / "short"))
    for key in ("#" * 40, "~" * 40, "é" * 40):
        with pytest.raises(ResourceError, match="not a key"):
            curve.client_keys(key)


def test_known_clients_are_read_afresh(tmp_path: Path) -> None:
    folder = tmp_path / "clients"
    with pytest.raises(ResourceError, match="clients: "):
        curve.KnownClients(folder)
    folder.mkdir()
    with pytest.raises(ResourceError, match="no client's certificate"):
        curve.KnownClients(folder)
    first, second = (curve.make_pair(folder / name)[1] for name in ("a", "b"))
    keys = [curve.load_pair(file).public for file in (first, second)]
    (folder / "b.key").rename(tmp_path / "b.key")
    known = curve.KnownClients(folder)
    assert [known.callback("", key) for key in keys] == [True, False]
    (tmp_path / "b.key").rename(folder / "b.key")
    (folder / "a.key").unlink()
    assert [known.callback("", key) for key in keys] == [False, True]
    (folder / "c.key").write_text("not a certificate")
    assert not known.callback("", keys[1])  # in doubt, nobody enters
