"""CURVE keys of ZeroMQ sockets: which addresses need them, and the files they live in.

Files are pyzmq's certificates: ``NAME.key`` holds a public key, ``NAME.key_secret`` both. A secret
one is written for its owner alone and refused if anyone else may read it.
"""

from __future__ import annotations

import ipaddress
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
from zmq.auth import create_certificates, load_certificate, load_certificates
from zmq.utils import z85

from ipc.errors import ResourceError

PUBLIC_SUFFIX, SECRET_SUFFIX = ".key", ".key_secret"
KEY_CHARACTERS = 40  # of a Z85 key
ZAP_DOMAIN = "clients"
_LOCAL_NAMES = ("localhost", "lo")


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Z85 keys. ``secret`` is left out of the text form."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"KeyPair({self.public.decode()})"


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """What a client needs: the server's public key, Z85, and a pair of its own."""

    server: bytes
    own: KeyPair


def is_exposed(endpoint: str) -> bool:
    """Whether other machines can reach an address: anything but ipc, inproc and tcp to loopback."""
    scheme, separator, rest = endpoint.partition("://")
    if not separator or scheme in ("ipc", "inproc"):
        return False
    host = rest.rpartition(":")[0].rpartition(";")[2].strip("[]")
    if host in _LOCAL_NAMES:
        return False
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return True


def make_pair(path: Path) -> tuple[Path, Path]:
    """Write a new pair as ``path``.key and ``path``.key_secret; returns both files.

    Raises ResourceError if one of them exists or cannot be written. Not for programs with several
    threads: the umask is changed meanwhile.
    """
    files = [path.with_name(path.name + suffix) for suffix in (PUBLIC_SUFFIX, SECRET_SUFFIX)]
    for file in files:
        if file.exists():
            raise ResourceError(f"{file}: exists already")
    before = os.umask(0o077)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        create_certificates(path.parent, path.name)
    except OSError as error:
        raise ResourceError(f"{error.filename or path}: {error.strerror}") from None
    finally:
        os.umask(before)
    return files[0], files[1]


def load_pair(path: str | Path) -> KeyPair:
    """The pair in a secret certificate.

    Raises ResourceError if it cannot be read, has no secret key, or others may read it.
    """
    file = Path(os.path.expanduser(path))
    public, secret = _load(file)
    if secret is None:
        raise ResourceError(f"{file}: has no secret key, the file ending in {SECRET_SUFFIX} does")
    if stat.S_IMODE(file.stat().st_mode) & 0o077:
        raise ResourceError(f"{file}: other users may read this secret key; chmod 600 it")
    return KeyPair(public, _checked(file, secret))


def client_keys(server: str, own: str = "") -> ClientKeys:
    """Keys of a client.

    Args:
        server: the server's public key: a certificate, or the key itself (40 characters, Z85).
        own: the client's secret certificate; empty = a fresh pair, for a server that lets in
            everybody who knows its key.

    Raises:
        ResourceError: a file cannot be used.
    """
    file = Path(os.path.expanduser(server))
    if len(server) == KEY_CHARACTERS and not file.exists():
        public = _checked("the server's key", server.encode())
    else:
        public = _load(file)[0]
    return ClientKeys(public, load_pair(own) if own else KeyPair(*zmq.curve_keypair()))


class KnownClients:
    """Public certificates of the clients that may connect, in a folder.

    They are read whenever somebody connects, so that adding and removing one needs no restart.
    """

    def __init__(self, folder: str | Path) -> None:
        """Raises ResourceError if there is no such folder, or no certificate can be read in it."""
        self._folder = Path(os.path.expanduser(folder))
        if not self._keys():
            raise ResourceError(f"{self._folder}: no client's certificate (*{PUBLIC_SUFFIX}) in it")

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a client with this public key may connect; pyzmq's authenticator asks."""
        try:
            return key in self._keys()
        except ResourceError:
            return False

    def _keys(self) -> set[bytes]:
        try:
            return set(load_certificates(self._folder))
        except (OSError, ValueError) as error:
            raise ResourceError(f"{self._folder}: {error}") from None


def serve(sock: zmq.Socket[Any], pair: KeyPair, known_only: bool) -> None:
    """Let in only clients with keys where ``sock`` is bound from now on.

    With ``known_only`` the context's authenticator decides; without a running one, nobody enters.
    """
    sock.setsockopt(zmq.CURVE_SERVER, 1)
    sock.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)
    if known_only:
        sock.setsockopt_string(zmq.ZAP_DOMAIN, ZAP_DOMAIN)


def join(sock: zmq.Socket[Any], keys: ClientKeys) -> None:
    """Use ``keys`` for what ``sock`` connects to from now on."""
    sock.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
    sock.setsockopt(zmq.CURVE_PUBLICKEY, keys.own.public)
    sock.setsockopt(zmq.CURVE_SECRETKEY, keys.own.secret)


def _load(file: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = load_certificate(file)
    except OSError as error:
        raise ResourceError(f"{file}: {error.strerror or 'no such file'}") from None
    except ValueError:
        raise ResourceError(f"{file}: no certificate, there is no public key in it") from None
    return _checked(file, public), secret


def _checked(what: object, key: bytes) -> bytes:
    try:
        if len(key) != KEY_CHARACTERS:
            raise ValueError
        z85.decode(key)
    except (ValueError, KeyError, struct.error):
        raise ResourceError(f"{what}: not a key of {KEY_CHARACTERS} characters (Z85)") from None
    return key
