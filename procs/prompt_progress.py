"""A line in the log, now and then, of how far a long prompt has been read."""

from __future__ import annotations

from collections.abc import Sequence

from structlog.typing import FilteringBoundLogger

from ssd_pipe.engine.step import Row

PERIOD_NS = 3_000_000_000


class PromptProgress:
    """Tells of requests whose first token has been waited for longer than PERIOD_NS, that often."""

    def __init__(self, log: FilteringBoundLogger) -> None:
        self._log = log
        self._due = 0

    def note(self, rows: Sequence[Row], now: int) -> None:
        """``rows`` of a step that ended at ``now``, a time of time.monotonic_ns."""
        if now < self._due:
            return
        for row in rows:
            request = row.request
            # The last part of a prompt samples.
            if row.sample or now - request.scheduled_ns < PERIOD_NS:
                continue
            read, whole = row.start + row.count, len(request.tokens)
            self._log.info("prompt", rid=request.rid, read=read, prompt_tokens=whole)
            self._due = now + PERIOD_NS
