"""Threads that work beside training."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

LEAST_URGENT = 10
"""Of Linux's levels from -20 to 19: about a tenth of what a thread that trains gets, where both want one core."""


def give_way() -> None:
    """Let this thread, and those that it starts from now on, run where training leaves time; on Linux, which knows
    priorities of threads."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LEAST_URGENT)
