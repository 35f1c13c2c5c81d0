"""``python -m ssd_pipe`` is ``ssd-pipe``."""

from ssd_pipe.cli.main import main

if __name__ == "__main__":
    main()
