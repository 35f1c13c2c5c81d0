"""CURVE on the public endpoint, owner-only sockets, and nothing on a wire that could run code."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import socket
import stat
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ipc import curve
from ssd_pipe.client import AsyncClient, Client
from ssd_pipe.config_load import load
from ssd_pipe.errors import ConfigError, RequestError, ResourceError
from ssd_pipe.gateway_address import usable_endpoint
from tests.frontend_peer import Echo, pipeline
from tests.pipelines import byte_model, command
from tests.test_pipeline import pipeline as started
from tests.waiting import wait_for

WAIT = 10.0
ROOT = Path(__file__).parent.parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Keys:
    """Certificates of a server, of one client it knows and of one it does not."""

    def __init__(self, folder: Path) -> None:
        self.server, self.server_secret = curve.make_pair(folder / "server")
        self.known = folder / "clients"
        self.friend, self.friend_secret = curve.make_pair(folder / "friend")
        self.stranger, self.stranger_secret = curve.make_pair(folder / "stranger")
        self.known.mkdir()
        self.admit(self.friend)

    def admit(self, certificate: Path) -> None:
        (self.known / certificate.name).write_bytes(certificate.read_bytes())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("keys"))


@contextlib.contextmanager
def guarded(tmp_path: Path, keys: Keys, **run: Any) -> Iterator[Any]:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    secret = str(keys.server_secret)
    with pipeline(tmp_path, endpoint, curve_secret_key=secret, **run) as made:
        echo = Echo(made.peer)
        try:
            yield made
        finally:
            made.stop()
            echo.close()


def test_who_knows_the_servers_key_is_served(
    tmp_path: Path, made: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    with guarded(tmp_path, made) as run:
        with Client(run.endpoint, server_key=str(made.server)) as client:
            assert client.generate("by file").text == "by file"
            assert client.status().run == "t"
        monkeypatch.setenv("SSD_SERVER_KEY", curve.load_pair(made.server_secret).public.decode())
        with Client(run.endpoint) as client:
            assert client.generate("by environment").text == "by environment"

        async def ask() -> str:
            async with AsyncClient(run.endpoint, client_key=str(made.stranger_secret)) as client:
                return (await client.generate("async")).text

        assert asyncio.run(ask()) == "async"
        monkeypatch.delenv("SSD_SERVER_KEY")
        with Client(run="t", shm_dir=run.shm_dir) as client:  # the socket file needs no keys
            assert client.generate("at home").text == "at home"


def test_who_does_not_is_refused_at_once_and_counted(tmp_path: Path, made: Keys) -> None:
    with guarded(tmp_path, made) as run:
        with (
            Client(run.endpoint, timeout=60) as client,
            pytest.raises(RequestError, match="SSD_SERVER_KEY") as caught,
        ):
            client.generate("x")
        assert caught.value.code == 401
        with (
            Client(run.endpoint, server_key=str(made.stranger), timeout=60) as client,
            pytest.raises(RequestError, match="another key") as caught,
        ):
            client.status()
        assert caught.value.code == 401
        with Client(run="t", shm_dir=run.shm_dir) as client:
            assert client.status().counters["frontend_failed_handshakes"] >= 2
            assert client.generate("served").text == "served"


def test_only_known_clients_enter_where_they_are_listed(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    server = str(keys.server)
    with guarded(tmp_path, keys, curve_clients=str(keys.known)) as run:
        friend, stranger = str(keys.friend_secret), str(keys.stranger_secret)
        with Client(run.endpoint, server_key=server, client_key=friend) as client:
            assert client.generate("friend").text == "friend"
        for own in (stranger, ""):
            with (
                Client(run.endpoint, server_key=server, client_key=own, timeout=60) as client,
                pytest.raises(RequestError, match="does not know this client") as caught,
            ):
                client.generate("x")
            assert caught.value.code == 401
        keys.admit(keys.stranger)
        with Client(run.endpoint, server_key=server, client_key=stranger) as client:
            assert client.generate("no stranger now").text == "no stranger now"


def test_nothing_can_be_read_on_the_way(tmp_path: Path, made: Keys) -> None:
    text = "unreadable for those between"
    with guarded(tmp_path, made) as run, socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(run.endpoint.rpartition(":")[2])
        seen: list[bytes] = []
        relay = threading.Thread(target=_relay, args=(listener, port, seen), daemon=True)
        relay.start()
        through = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        with Client(through, server_key=str(made.server)) as client:
            assert client.generate(text).text == text
        relay.join(WAIT)
        wire = b"".join(seen)
    assert b"CURVE" in wire
    for word in text.split():
        assert len(word) < 4 or word.encode() not in wire


def _relay(listener: socket.socket, port: int, seen: list[bytes]) -> None:
    """Pass one connection on in both directions and keep what goes by."""
    near, _ = listener.accept()
    wait_for(lambda: listens(port))
    far = socket.create_connection(("127.0.0.1", port))

    def copy(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                seen.append(data)
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)

    back = threading.Thread(target=copy, args=(far, near), daemon=True)
    back.start()
    copy(near, far)
    back.join(WAIT)
    near.close()
    far.close()


@pytest.mark.parametrize(
    ("overrides", "field", "words"),
    [
        ({"run.endpoint": "tcp://0.0.0.0:5555"}, "run.curve_secret_key", "ssd-pipe keys"),
        ({"run.endpoint": "tcp://[::]:5555"}, "run.curve_secret_key", "other machines"),
        ({"run.curve_clients": "x"}, "run.curve_secret_key", "run.curve_clients"),
    ],
)
def test_an_exposed_endpoint_needs_keys(overrides: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        load(None, overrides)
    assert caught.value.field == field
    load(None, {"run.endpoint": "tcp://127.0.0.1:5555"})
    load(None, {"run.endpoint": "tcp://0.0.0.0:5555", "run.curve_secret_key": "k"})


def test_a_client_does_not_speak_in_clear_to_other_machines(
    monkeypatch: pytest.MonkeyPatch, made: Keys
) -> None:
    monkeypatch.delenv("SSD_SERVER_KEY", raising=False)
    with pytest.raises(ResourceError, match="SSD_SERVER_KEY"):
        Client("tcp://192.0.2.1:5555")
    with pytest.raises(ResourceError, match="SSD_SERVER_KEY"):
        Client("tcp://127.0.0.1:5555", client_key=str(made.friend_secret))


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=60, check=False
    )


def test_the_program_makes_keys_and_uses_them(tmp_path: Path, shm_dir: Path) -> None:
    """Over the address that every machine reaches; socket files are their owner's alone."""
    folder = tmp_path / "keys"
    done = run_cli("keys", str(folder / "server"))
    assert done.returncode == 0, done.stderr
    assert str(folder / "server.key_secret") in done.stdout
    assert run_cli("keys", str(folder / "server")).returncode == 1
    models = tmp_path / "models"
    models.mkdir()
    target = byte_model(models, "target")
    port, server = free_port(), str(folder / "server.key")
    options = ["--endpoint", f"tcp://0.0.0.0:{port}"]
    refused = run_cli("up", "--no-pull", "--target", str(target), *options)
    assert refused.returncode == 2
    assert "run.curve_secret_key" in refused.stderr
    options += ["--curve-secret-key", f"{folder}/server.key_secret"]
    with started((target, target), tmp_path, shm_dir, "ar", *options) as run:
        assert run.facts["endpoint"] == usable_endpoint(f"tcp://0.0.0.0:{port}")
        place = ["--endpoint", f"tcp://127.0.0.1:{port}", "--server-key", server]
        ask = ["generate", "hello", "--raw", "--max-tokens", "4", "--ignore-eos"]
        assert run_cli(*ask, *place).returncode == 0
        status = run_cli("status", *place)
        assert "frontend_failed_handshakes 0" in status.stdout, status.stderr
        without = run_cli(*ask, *place[:2])
        assert (without.returncode, without.stderr.count("\n")) == (1, 1)
        assert "SSD_SERVER_KEY" in without.stderr
        [run_dir] = shm_dir.glob("ssd-pipe-*/*")
        files = [path for path in run_dir.iterdir() if path.is_socket()]
        assert {path.name for path in files} >= {"public.sock", "hub.sock", "requests.sock"}
        for path in (run_dir, run_dir.parent, *files):
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


FORBIDDEN = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {
    "send_pyobj",
    "recv_pyobj",
    "broadcast_object_list",
    "all_gather_object",
    "gather_object",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}


def test_nothing_is_pickled() -> None:
    """No module of ours can unpickle: neither by import nor by what zmq and torch offer."""
    found = []
    for package in ("ssd_pipe", "procs", "ipc", "models", "bench"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names: list[str] = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom):
                    names = [node.module or ""]
                elif isinstance(node, ast.Attribute):
                    loads = isinstance(node.value, ast.Name) and node.value.id == "torch"
                    unsafe = node.attr in FORBIDDEN_CALLS or (loads and node.attr == "load")
                    found += [f"{path}: {node.attr}"] * unsafe
                found += [f"{path}: {n}" for n in names if n.partition(".")[0] in FORBIDDEN]
                found += [f"{path}: {n}" for n in names if n.startswith("multiprocessing")]
    assert found == []
