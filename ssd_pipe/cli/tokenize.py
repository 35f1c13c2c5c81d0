"""``ssd-pipe tokenize``: between text and token ids."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from ipc.run_files import RunFiles
from ipc.rundir import find_run
from ssd_pipe.cli.prompts import (
    System,
    TemplateKwargs,
    check_unicode,
    parse_variables,
    read_prompts,
)
from ssd_pipe.config import RunSection
from ssd_pipe.config_load import config_of
from ssd_pipe.errors import ConfigError, RequestError, ResourceError

if TYPE_CHECKING:
    from ssd_pipe.text.tokenizer import Tokenizer


def tokenize(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TEXT",
            help="what to tokenize, or ids to decode; none or - reads standard input",
            show_default=False,
        ),
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="read it from this file")
    ] = None,
    decode: Annotated[bool, typer.Option("--decode", "-d", help="ids to text")] = False,
    chat: Annotated[
        bool, typer.Option("--chat", help="a user's message, in the model's chat template")
    ] = False,
    system: System = "",
    template_kwargs: TemplateKwargs = None,
    special: Annotated[
        bool,
        typer.Option("--special/--no-special", help="tokens the tokenizer adds by itself (BOS)"),
    ] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="with the names of the tokens in the vocabulary")
    ] = False,
    model: Annotated[
        str, typer.Option("--model", "-m", help="whose tokenizer; none = the running target's")
    ] = "",
    run: Annotated[str, typer.Option("--run", help="name of a running pipeline")] = "",
    shm_dir: Annotated[str, typer.Option("--shm-dir", help="its run.shm_dir")] = "",
) -> None:
    """Show the token ids of a text, or with --decode the text of ids, special tokens included."""
    if model and (run or shm_dir):
        raise ConfigError("--model", "names a model, --run and --shm-dir a pipeline")
    if decode and (chat or not special or as_json):
        raise ConfigError("--decode", "goes the other way: without --chat, --no-special and --json")
    if not chat and (system or template_kwargs is not None):
        flag = "--system" if system else "--chat-template-kwargs"
        raise ConfigError(flag, "is for a chat template: --chat")
    if words and len(words) > 1 and not decode:
        raise ConfigError("TEXT", "must be one argument: put it in quotes")
    given = [" ".join(words)] if words else []
    check_unicode("TEXT", "".join(given))
    (text,) = (each.text for each in read_prompts(given, [file] if file is not None else []))
    check_unicode("--system", system)
    tokenizer = _load(model, run, shm_dir)
    if decode:
        print(_text(tokenizer, text))
        return
    if chat:
        turns = [("system", system), ("user", text)]
        messages = [{"role": role, "content": said} for role, said in turns if said]
        try:
            text = tokenizer.render_chat(messages, parse_variables(template_kwargs))
        except RequestError as error:
            raise ConfigError("--chat", str(error)) from None
    ids = tokenizer.encode(text, rendered=chat or not special)
    if as_json:
        told = {"count": len(ids), "tokens": ids, "token_strs": tokenizer.names(ids)}
        print(msgspec.json.encode(told).decode())
    else:
        print(*ids)


def _load(model: str, run: str, shm_dir: str) -> Tokenizer:
    from ssd_pipe.hub import resolve
    from ssd_pipe.text.tokenizer import Tokenizer

    return Tokenizer.load(resolve(model or _running_target(shm_dir, run)))


def _running_target(shm_dir: str, name: str) -> str:
    """The target of a run, or of the only one there is. Raises ResourceError if none is told."""
    try:
        run = RunFiles(find_run(shm_dir or RunSection().shm_dir, name))
    except ResourceError as error:
        reason = f"no pipeline whose tokenizer it could be: {error}; name a --model"
        raise ResourceError(reason) from None
    config = config_of(run)
    if config is None:
        raise ResourceError(f"run {run.name!r} does not say which model it has; name a --model")
    return config.target.model


def _text(tokenizer: Tokenizer, written: str) -> str:
    try:
        ids: Sequence[int] = [int(part) for part in re.split(r"[\s,\[\]]+", written) if part]
        tokenizer.names(ids)  # which refuses what is no token's id
    except ValueError as error:
        raise ConfigError("--decode", f"must be token ids: {error}") from None
    except RequestError as error:
        raise ConfigError("--decode", str(error).removeprefix("tokens: ")) from None
    return tokenizer.decode(ids, special=True)
