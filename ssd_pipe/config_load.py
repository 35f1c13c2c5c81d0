"""From a TOML file and command-line overrides to a checked PipelineConfig."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ipc.curve import is_exposed
from ipc.run_files import SOCKET_PATH_LIMIT, RunFiles
from ssd_pipe.config import FanOut, PipelineConfig, config_from_mapping
from ssd_pipe.errors import ConfigError


def load(path: Path | None, overrides: Mapping[str, Any]) -> PipelineConfig:
    """Read ``path`` (None: all defaults), lay ``overrides`` over it, check the result.

    Args:
        path: TOML file with the sections of PipelineConfig.
        overrides: dotted setting name -> value, e.g. ``{"speculation.k": 4}``.

    Raises:
        ConfigError: missing file, bad TOML, unknown setting, wrong type, out of range; names it.
    """
    mapping = _read_toml(path) if path is not None else {}
    for name, value in overrides.items():
        _lay(mapping, name, value)
    try:
        config = config_from_mapping(mapping)
    except ConfigError as error:
        if str(error).endswith("unknown setting"):
            # An unknown section is reported alone; what was asked for is a setting in it.
            section = f"{error.field}."
            name = next((n for n in overrides if n.startswith(section)), error.field)
            if isinstance(mapping.get(name), dict):
                raise ConfigError(name, "unknown section" + _suggestion(name, SECTIONS)) from None
            raise ConfigError(name, "unknown setting" + _suggestion(name)) from None
        raise
    check_combination(config)
    return config


def decode(data: bytes) -> PipelineConfig:
    """The configuration a run directory's ``config.json`` holds. Raises ConfigError."""
    try:
        mapping = msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError("config.json", f"not readable: {error}") from None
    return config_from_mapping(mapping)


def config_of(run: RunFiles) -> PipelineConfig | None:
    """The configuration of a run.

    None if its first process has not written it yet, or another version of this program did.
    """
    try:
        return decode(run.config.read_bytes())
    except (OSError, ConfigError):
        return None


def parse_set(text: str) -> tuple[str, Any]:
    """``section.key=value`` -> (dotted name, value read as TOML; a bare word is a string)."""
    name, equals, value = text.partition("=")
    name, value = name.strip(), value.strip()
    if not equals or not name:
        raise ConfigError("--set", f"must look like section.key=value, got {text!r}")
    return name, parse_value(name, value)


def parse_value(name: str, text: str) -> Any:
    """One TOML value; text that is not TOML and opens no quote or bracket is taken as a string."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError as error:
        if text[:1] in tuple("\"'[{") or "\n" in text:
            raise ConfigError(name, f"not a TOML value: {text!r} ({error})") from None
        return text
    if set(parsed) != {"value"}:
        raise ConfigError(name, f"one value expected, got {text!r}")
    return parsed["value"]


def parse_fan_out(text: str, field: str = "speculation.fan_out") -> FanOut:
    """``"3"`` -> 3, ``"4,3,2,2,1,6"`` -> one count per accepted length. Raises ConfigError."""
    try:
        counts = [int(part) for part in text.strip("[] ").split(",")]
    except ValueError:
        raise ConfigError(
            field, f"a number or a comma-separated list of numbers, got {text!r}"
        ) from None
    return counts if "," in text or "[" in text else counts[0]


def check_combination(config: PipelineConfig) -> None:
    """Settings that do not fit each other in the chosen mode. Raises ConfigError."""
    target, draft, endpoint = config.target, config.draft, config.run.endpoint
    if target.tp > 1 and target.device.startswith("cuda:"):
        raise ConfigError(
            "target.device",
            f"{target.device!r} is one device, but target.tp = {target.tp} needs one per rank; "
            "use 'cuda'",
        )
    for name, section in (("target", target), ("draft", draft)):
        _check_device(f"{name}.device", section.device)
    if endpoint:
        _check_endpoint(endpoint)
    if config.run.curve_clients and not config.run.curve_secret_key:
        raise ConfigError("run.curve_secret_key", "needed with run.curve_clients")
    if endpoint and is_exposed(endpoint) and not config.run.curve_secret_key:
        raise ConfigError(
            "run.curve_secret_key",
            f"needed, other machines reach {endpoint}; make a pair with: ssd-pipe keys server",
        )


def _check_device(field: str, device: str) -> None:
    kind, colon, index = device.partition(":")
    if device in ("auto", "cpu", "cuda") or (kind == "cuda" and colon and index.isdecimal()):
        return
    raise ConfigError(field, f"must be 'auto', 'cpu', 'cuda' or 'cuda:N', got {device!r}")


def _check_endpoint(endpoint: str) -> None:
    field = "run.endpoint"
    scheme, separator, rest = endpoint.partition("://")
    if scheme == "ipc" and separator and rest:
        size = len(rest.encode())
        if size > SOCKET_PATH_LIMIT:
            raise ConfigError(field, f"socket path has {size} bytes, at most {SOCKET_PATH_LIMIT}")
        return
    host, _, port = rest.rpartition(":")
    if host == "*":
        raise ConfigError(field, "'*' is no address clients can use; for every network: 0.0.0.0")
    if scheme == "tcp" and separator and host and port.isdecimal() and 1 <= int(port) <= 65535:
        return
    raise ConfigError(field, f"must be tcp://HOST:PORT or ipc://PATH, got {endpoint!r}")


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(str(path), "no such file") from None
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), f"not valid TOML: {error}") from None


def _lay(mapping: dict[str, Any], name: str, value: Any) -> None:
    *sections, key = name.split(".")
    table = mapping
    for depth, section in enumerate(sections):
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise ConfigError(".".join(sections[: depth + 1]), "is a value, not a section")
    table[key] = value


def setting_names() -> list[str]:
    """Every dotted setting name, in declaration order."""
    names = []
    for field in msgspec.structs.fields(PipelineConfig):
        if isinstance(field.default, msgspec.Struct):
            inner = msgspec.structs.fields(type(field.default))
            names += [f"{field.name}.{setting.name}" for setting in inner]
        else:
            names.append(field.name)
    return names


SECTIONS = list(dict.fromkeys(n.partition(".")[0] for n in setting_names() if "." in n))


def _suggestion(name: str, names: Sequence[str] = ()) -> str:
    """ " (did you mean ...?)" for a near miss, or for the right key in the wrong section.

    ``names`` are what it may have meant; none = every setting.
    """
    names = names or setting_names()
    last = name.rpartition(".")[2]
    near = difflib.get_close_matches(name, names, 1, 0.75) or [
        n for n in names if n.rpartition(".")[2] == last
    ]
    return f" (did you mean {near[0]}?)" if near else ""
