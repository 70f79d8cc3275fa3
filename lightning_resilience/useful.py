"""The seconds of training of this life, and which of them were of use.

What saves kept training still for is not, nor what came to nothing because the run was taken back.  The ledger writes
both down, goodput is made of them, and a run that is taken back loses what it had done since.
"""

from __future__ import annotations

from collections import deque

REMEMBERED = 10_000
"""Saves of which it is remembered when they were made."""


class Useful:
    """Counts them, from ``began`` on.

    Args:
        began: seconds of a monotonic clock, as all times here.
    """

    def __init__(self, began: float = 0.0) -> None:
        self.began = began
        self.wasted = 0.0
        """Seconds since then that were of no use."""
        self._until: deque[tuple[tuple[int, int], float]] = deque(maxlen=REMEMBERED)

    def seconds(self, now: float) -> float:
        """How many were of use up to ``now``."""
        return max(now - self.began - self.wasted, 0.0)

    def saved(self, order: tuple[int, int], began: float, stall: float) -> None:
        """A checkpoint has what was done until its save ``began``, for which training stood still for ``stall`` s."""
        self._until.append((order, self.seconds(began)))
        self.wasted += stall

    def back_to(self, order: tuple[int, int], now: float) -> float:
        """How many came to nothing because the run goes on from that checkpoint, or from one of an earlier life."""
        while self._until and self._until[-1][0] > order:
            self._until.pop()
        kept = self._until[-1][1] if self._until else 0.0
        lost = max(self.seconds(now) - kept, 0.0)
        self.wasted += lost
        return lost
