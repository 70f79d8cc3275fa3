"""Trying again what may go away by itself: attempts, and pauses between them that grow and vary."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from lightning_resilience.errors import TierUnavailable

T = TypeVar("T")


@dataclass
class Patience:
    """Tries again what may go away by itself, with pauses that grow and vary.

    Args:
        attempts: how often at most.
        first: seconds of the longest first pause; the longest doubles with each attempt.
        longest: seconds that no pause exceeds.
        stop: ends a pause, and with it the patience.
    """

    attempts: int = 6
    first: float = 0.5
    longest: float = 30.0
    stop: threading.Event | None = None

    def __call__(self, call: Callable[[], T]) -> T:
        """What ``call`` returns, once it does.

        Raises:
            TierUnavailable: it failed for the last time, or ``stop`` was set.
        """
        for attempt in range(1, self.attempts + 1):
            try:
                return call()
            except TierUnavailable:
                pause = random.uniform(0, min(self.longest, self.first * 2 ** (attempt - 1)))
                if attempt == self.attempts or self.pause(pause):
                    raise
        raise AssertionError("unreachable")

    def pause(self, seconds: float) -> bool:
        """Wait; whether that was ended by ``stop``."""
        if self.stop is None:
            time.sleep(seconds)
            return False
        return self.stop.wait(seconds)
