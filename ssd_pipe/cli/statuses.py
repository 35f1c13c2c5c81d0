"""Exit statuses of the command line."""

from __future__ import annotations

FAILED_STATUS = 1
USAGE_STATUS = 2
INTERRUPTED_STATUS = 130
