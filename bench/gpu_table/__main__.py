"""``python -m bench.gpu_table``."""

from __future__ import annotations

import sys

from bench.__main__ import main

if __name__ == "__main__":
    raise SystemExit(main(["gpu-table", *sys.argv[1:]]))
