"""When a process, or the whole group, is started again, and when it is given up."""

from __future__ import annotations

from ssd_pipe.config import PipelineConfig

FIRST_WAIT = 0.5  # seconds before the first restart; each further one in a row waits twice as long
LONGEST_WAIT = 30.0


class RestartBudget:
    """Restarts of one thing in a row.

    Only service counts towards the end of a row, not time: a model that takes minutes to load and
    dies at once must not be loaded for ever.

    Attributes:
        spent: restarts of this row.
    """

    def __init__(self, most: int, window: float) -> None:
        """``most`` restarts in a row; ``window`` seconds of service end the row."""
        self._most = most
        self._window = window
        self.spent = 0

    def take(self, served: float) -> float | None:
        """The thing has failed after ``served`` seconds of service.

        Returns the seconds to wait before it is started again, None if it is to be given up.
        """
        if served >= self._window:
            self.spent = 0
        if self.spent >= self._most:
            return None
        self.spent += 1
        return min(FIRST_WAIT * 2.0 ** (self.spent - 1), LONGEST_WAIT)


def solo_roles(config: PipelineConfig) -> frozenset[str]:
    """Roles whose loss does not end the group once it has been ready.

    The draft, without which the target decodes alone; the gateway, which keeps nothing but open
    connections. All others share state of requests, and go and come back together.
    """
    roles = set()
    if config.run.on_draft_failure == "degrade":
        roles.add("draft")
    if config.run.on_failure == "restart":
        roles.add("gateway")
    return frozenset(roles)
