"""The options that several commands share, each declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import typer

from ssd_pipe.cli.expand import expand, option
from ssd_pipe.config import (
    Allocation,
    Backup,
    LoadFormat,
    LogLevel,
    Mode,
    OnFailure,
    PipelineConfig,
    Rule,
)
from ssd_pipe.config_load import load, parse_fan_out, parse_set
from ssd_pipe.errors import ConfigError, RequestError
from ssd_pipe.params import SamplingParams, checked


class Setting(msgspec.Struct, frozen=True):
    """One option: its flag, the dotted setting it overrides, the type typer parses, its help."""

    flag: str
    setting: str
    type: Any
    help: str

    @property
    def parameter(self) -> str:
        return self.flag.partition("/")[0].removeprefix("--").replace("-", "_")


SETTINGS = (
    Setting("--mode", "mode", Mode, "target alone, draft and target in turn, or in parallel"),
    Setting(
        "--adaptive/--no-adaptive",
        "speculation.adaptive",
        bool,
        "choose k and branches by batch size and acceptance, or always take those set",
    ),
    Setting("--k", "speculation.k", int, "draft tokens a round, at most"),
    Setting("--fan-out", "speculation.fan_out", str, "branches: N, or one count per length 0..k"),
    Setting("--fan-out-miss", "speculation.fan_out_miss", str, "the same for after a miss"),
    Setting("--allocation", "speculation.allocation", Allocation, "how the branches are split"),
    Setting("--rule", "speculation.rule", Rule, "how proposals are judged"),
    Setting("--backup", "speculation.backup", Backup, "what makes the chain on a miss"),
    Setting(
        "--synthetic-acceptance",
        "speculation.synthetic_acceptance",
        str,
        "for timing: accept draft tokens at this RATE, or as this FILE says",
    ),
    Setting(
        "--load-format",
        "target.load_format",
        LoadFormat,
        "the target's weights: its safetensors files, or dummy (random) ones",
    ),
    Setting("--tp", "target.tp", int, "tensor-parallel target processes"),
    Setting("--target", "target.model", str, "target model: folder, hub id or built-in name"),
    Setting("--draft", "draft.model", str, "draft model, likewise"),
    Setting("--draft-workers", "draft.workers", int, "draft processes that share the branches"),
    Setting("--run", "run.name", str, "name of the run"),
    Setting("--endpoint", "run.endpoint", str, "public ZeroMQ address, tcp:// or ipc://"),
    Setting("--curve-secret-key", "run.curve_secret_key", str, "secret certificate of --endpoint"),
    Setting("--curve-clients", "run.curve_clients", str, "folder of the clients it lets in"),
    Setting("--max-num-seqs", "scheduler.max_num_seqs", int, "sequences running at once"),
    Setting("--max-model-len", "scheduler.max_model_len", int, "prompt + output tokens"),
    Setting(
        "--http",
        "gateway.enabled",
        bool,
        "with an OpenAI-compatible HTTP gateway; its flags imply it",
    ),
    Setting("--host", "gateway.host", str, "address the gateway listens on [127.0.0.1]"),
    Setting("--port", "gateway.port", int, "TCP port of the gateway [8000], 0 = any free one"),
    Setting("--api-key", "gateway.api_key", str, "bearer token of clients; or set SSD_API_KEY"),
    Setting("--served-model-name", "gateway.model_name", str, "what HTTP clients call the model"),
    Setting(
        "--on-failure",
        "run.on_failure",
        OnFailure,
        "when a process dies or hangs: stop the pipeline, or restart it",
    ),
    Setting("--log-dir", "run.log_dir", str, "parent of this run's log folder"),
    Setting("--log-level", "run.log_level", LogLevel, "lowest level logged"),
    Setting("--torch-profiler", "run.torch_profiler", int, "record the kernels of so many steps"),
)


HTTP_ONLY = ("--host", "--port", "--api-key", "--served-model-name")
"""Flags that mean nothing without a gateway, so that they ask for one."""


class ConfigSource(msgspec.Struct, frozen=True):
    """What the command line said about the configuration, before any file is read."""

    path: Path | None
    overrides: dict[str, Any]

    def load(self) -> PipelineConfig:
        """Raises ConfigError."""
        return load(self.path, self.overrides)


def _source(values: dict[str, Any]) -> ConfigSource:
    overrides: dict[str, Any] = dict(parse_set(text) for text in values["set_"])
    for setting in SETTINGS:
        value = values[setting.parameter]
        if value is None:
            continue
        if setting.setting.startswith("speculation.fan_out"):
            value = parse_fan_out(value, setting.setting)
        if setting.flag in HTTP_ONLY:
            overrides.setdefault("gateway.enabled", True)
        overrides[setting.setting] = value
    if overrides.get("gateway.api_key") == "":  # as from a shell variable that is not set
        raise ConfigError("gateway.api_key", "is empty; leave it out if no key is to be asked for")
    return ConfigSource(only_one("--config", values["config"]), overrides)


def only_one(flag: str, files: list[Path]) -> Path | None:
    """The one file that is named, None if none is. Raises ConfigError for several."""
    if len(files) > 1:
        raise ConfigError(flag, f"takes one file, got {', '.join(map(str, files))}")
    return files[0] if files else None


config_options = expand(
    "source",
    [
        option(
            "config",
            Annotated[list[Path], typer.Option("--config", metavar="FILE", help="TOML file")],
            [],
        ),
        *(
            option(s.parameter, Annotated[s.type | None, typer.Option(s.flag, help=s.help)])
            for s in SETTINGS
        ),
        option(
            "set_",
            Annotated[
                list[str],
                typer.Option("--set", metavar="SECTION.KEY=VALUE", help="any setting, repeatable"),
            ],
            [],
        ),
    ],
    _source,
)
"""Gives a command every configuration option, as ``source: ConfigSource``."""


MAX_TOKENS = 256
"""Of an answer, where nothing is said."""


class Sampling(NamedTuple):
    """What the sampling options say; ``limited``: --max-tokens was given."""

    params: SamplingParams
    limited: bool


def _sampling(values: dict[str, Any]) -> Sampling:
    given = {name: value for name, value in values.items() if value is not None}
    limited = "max_tokens" in given
    given.setdefault("max_tokens", MAX_TOKENS)
    try:
        params = checked(None, given)
    except RequestError as error:
        field = error.field.partition(".")[0]
        reason = str(error).removeprefix(f"{error.field}: ")
        raise ConfigError(f"--{field.replace('_', '-')}", reason) from None
    return Sampling(params, limited)


sampling_options = expand(
    "sampling",
    [
        option(
            "max_tokens",
            Annotated[
                int | None,
                typer.Option(
                    "--max-tokens", help=f"of an answer; none = {MAX_TOKENS}, or what a server says"
                ),
            ],
        ),
        option("temperature", Annotated[float, typer.Option(help="0 = greedy")], 0.0),
        option(
            "top_p",
            Annotated[
                float,
                typer.Option("--top-p", help="keep the likeliest tokens up to this sum; 1 = off"),
            ],
            1.0,
        ),
        option(
            "top_k",
            Annotated[
                int,
                typer.Option("--top-k", help="keep so many of the likeliest tokens; 0 or -1 = off"),
            ],
            0,
        ),
        option(
            "min_p",
            Annotated[
                float,
                typer.Option(
                    "--min-p", help="drop tokens below this share of the likeliest one; 0 = off"
                ),
            ],
            0.0,
        ),
        option(
            "repetition_penalty",
            Annotated[
                float,
                typer.Option(
                    "--repetition-penalty",
                    help="above 1 = less of what is in prompt or answer; 1 = off",
                ),
            ],
            1.0,
        ),
        option(
            "presence_penalty",
            Annotated[
                float,
                typer.Option(
                    "--presence-penalty",
                    help="taken off logits of tokens in the answer, -2 to 2",
                ),
            ],
            0.0,
        ),
        option(
            "frequency_penalty",
            Annotated[
                float,
                typer.Option("--frequency-penalty", help="the same for each occurrence, -2 to 2"),
            ],
            0.0,
        ),
        option(
            "min_tokens",
            Annotated[int, typer.Option("--min-tokens", help="no end before so many tokens")],
            0,
        ),
        option("seed", Annotated[int | None, typer.Option(help="same seed, same answer")]),
        option(
            "ignore_eos",
            Annotated[
                bool, typer.Option("--ignore-eos", help="go on after an end-of-sequence token")
            ],
            False,
        ),
        option("timeout", Annotated[float | None, typer.Option(help="seconds, then give up")]),
        option("stop", Annotated[list[str], typer.Option(help="stop text, repeatable")], []),
    ],
    _sampling,
)
"""Gives a command the sampling options, as ``sampling: Sampling``."""
