"""The program ``ssd-pipe``, also as ``python -m ssd_pipe``."""

from __future__ import annotations

import signal


def main() -> None:
    """Import the commands and run one; see ``ssd_pipe.cli.main``."""
    # Ctrl-C while they are imported ends the program as it ends others, without a traceback.
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from ssd_pipe.cli.main import main as run

    signal.signal(signal.SIGINT, handler)
    run()


if __name__ == "__main__":
    main()
