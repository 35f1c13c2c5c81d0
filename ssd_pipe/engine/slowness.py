"""How much slower the machine is than it was, told by steps of a size that it has done before.

Other programs, heat and clocks change the speed of everything at once, within seconds and by more
than what one way to speculate has over another. Times that are divided by the slowness of their
moment can be compared over such changes.
"""

from __future__ import annotations

from collections.abc import Hashable

from ssd_pipe.engine.pacing import Ema

SETTLED = 8  # steps of a kind from which it tells
FOLLOW = 0.2  # share of a step's word in the present slowness
KEEP = 0.98  # weight that a usual time keeps: it must be slower than what it is there to tell
CLIP = 1.5  # a step further from its usual time is an accident


class Slowness:
    """Attributes: ``now``, the present slowness; 1 is the machine's at the start."""

    def __init__(self) -> None:
        self.now = 1.0
        self._usual: dict[Hashable, tuple[Ema, int]] = {}

    def observe(self, kind: Hashable, seconds: float) -> None:
        """A step of a ``kind``, all of which do the same work, took so long."""
        usual, count = self._usual.get(kind) or (Ema(KEEP), 0)
        if count >= SETTLED:
            ratio = seconds / (self.now * usual.value(seconds))
            self.now *= min(CLIP, max(1 / CLIP, ratio)) ** FOLLOW
        usual.observe(seconds / self.now)
        self._usual[kind] = usual, min(count + 1, SETTLED)
