"""Whether something that a person or a file gave is a number; True and False are none.  Pure."""

from __future__ import annotations

import math
from typing import TypeGuard


def is_whole(value: object, least: float = -math.inf) -> TypeGuard[int]:
    """Whether it is a whole number, and not less than ``least``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: object, least: float = -math.inf) -> TypeGuard[float]:
    """Whether it is a number, whole or not, and not less than ``least``."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= least
