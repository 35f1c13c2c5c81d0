"""From what clients submit to requests the scheduler takes, without holding up the event loop."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from structlog.typing import FilteringBoundLogger

from ipc.messages.client import Submit
from ssd_pipe.errors import RequestError
from ssd_pipe.text.prepare import Prepared, Preparer


class Intake:
    """Short texts are prepared at once, long ones and grammars on a thread, one after another.

    Args:
        preparer: does the work.
        log: where failures that are nobody's mistake are told.
        max_waiting: long ones waiting for the thread; one more is refused with 429.
    """

    def __init__(self, preparer: Preparer, log: FilteringBoundLogger, max_waiting: int) -> None:
        self._preparer = preparer
        self._log = log
        self._max_waiting = max_waiting
        self._waiting = 0
        self._pool = ThreadPoolExecutor(1, "tokenize")

    def is_long(self, submit: Submit) -> bool:
        """Whether it is one for ``later``."""
        return self._preparer.is_long(submit)

    def now(self, submit: Submit) -> Prepared:
        """Raises RequestError and nothing else: a library that fails on what a client sent ends
        that request only."""
        try:
            return self._preparer.prepare(submit)
        except RequestError:
            raise
        except BaseException:  # panics of the Rust libraries are no Exception
            self._log.error("request failed", id=submit.id, exc_info=True)
            raise RequestError(500, "internal error") from None

    async def later(self, submit: Submit) -> Prepared:
        """The same on the thread. Raises RequestError (429) when too many wait for it."""
        if self._waiting >= self._max_waiting:
            limit = f"scheduler.max_waiting = {self._max_waiting}"
            raise RequestError(429, f"the line of long prompts is full ({limit})")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, self.now, submit)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """Drop what has not begun; does not wait."""
        self._pool.shutdown(wait=False, cancel_futures=True)
