"""The ``ssd-pipe`` program: its commands, and how errors leave it.

Commands import what they need when they run, so that ``--help`` and the light ones stay fast.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from ssd_pipe.cli import (
    bench,
    chat,
    doctor,
    generate,
    keys,
    pipeline,
    pull,
    runs,
    status,
    tokenize,
    top,
    trace,
)
from ssd_pipe.cli.statuses import FAILED_STATUS, INTERRUPTED_STATUS, USAGE_STATUS
from ssd_pipe.errors import ConfigError, SsdPipeError

app = typer.Typer(
    name="ssd-pipe",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from ssd_pipe import __version__

        print(f"ssd-pipe {__version__}")
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Exact speculative speculative decoding as a multi-process pipeline."""


app.command("up")(pipeline.up)
app.command("serve")(pipeline.serve)
app.command("run")(pipeline.run)
app.command("demo")(pipeline.demo)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("tokenize")(tokenize.tokenize)
app.command("pull")(pull.pull)
app.command("ps")(runs.ps)
app.command("down")(runs.down)
app.command("status")(status.status)
app.command("top")(top.top)
app.command("trace")(trace.trace)
app.command("keys")(keys.keys)
app.command("doctor")(doctor.doctor)
app.command("bench", context_settings=bench.PASS_THROUGH, add_help_option=False)(bench.bench)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; exits 2 for a wrong setting or usage, 1 for any other failure.

    SSD_DEBUG=1 in the environment shows the traceback of an error.
    """
    try:
        status = app(arguments, standalone_mode=False)
    except Exception as error:
        if os.environ.get("SSD_DEBUG") == "1":
            raise
        _exit_with(error)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED_STATUS)
    sys.exit(status if isinstance(status, int) else 0)


def _exit_with(error: Exception) -> None:
    """Print one line, leave with the status of this kind of error."""
    # typer brings its own copy of click in some versions; both kinds of error look like this.
    describe = getattr(error, "format_message", None)
    if isinstance(error, typer.Abort):
        sys.exit(INTERRUPTED_STATUS)
    if isinstance(error, ConfigError):
        fail(str(error), USAGE_STATUS)
    if isinstance(error, SsdPipeError):
        fail(str(error), FAILED_STATUS)
    if describe is not None:
        fail(describe() or "no command given; see ssd-pipe --help", USAGE_STATUS)
    if isinstance(error, BrokenPipeError):
        # Whoever read the output has gone; nothing may be written at exit any more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(FAILED_STATUS)
    fail(f"{type(error).__name__}: {error} (SSD_DEBUG=1 shows where)", FAILED_STATUS)


def fail(message: str, status: int) -> None:
    """``error: message`` on one line of stderr, then exit."""
    print("error:", " ".join(message.split()), file=sys.stderr, flush=True)
    sys.exit(status)
