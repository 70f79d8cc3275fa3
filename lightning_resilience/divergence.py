"""Whether the loss has left its course: a spike that lasts, or a loss that is not finite.

The loss is compared with its own past, its median-like level and its usual deviation from it, so that scaling or
shifting it changes nothing.  While it is off course its past stands still, or a spike would become the new normal.
Where it stays elsewhere for long, that is its new course: training does not wait for an old one for ever.

Pure: numbers in, a state of plain values out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_resilience.errors import SetupError
from lightning_resilience.numeric import is_whole

WINDOW = 100
"""Losses that a course is made of."""
OFF = 6.0
"""Usual deviations above its level from which on a loss is off course."""
BACK = 3.0
"""Usual deviations above its level below which it is back."""
IN_A_ROW = 4
"""Losses that are off course, or back, one after another before it counts: single ones are a matter of the data."""
WARM = 20
"""Losses after which there is a course to be off."""
SETTLES = 10
"""Windows after which a loss that stays elsewhere has a new course."""


class Course:
    """Follows one loss.

    Args:
        window: losses that its past is made of, and for which it has to be back until all is well.
    """

    _STATE = (
        *("_seen", "_level", "_deviation", "_widest"),
        *("_off", "_first", "_back", "_since", "_lasts", "_row", "_unbroken"),
    )

    def __init__(self, window: int = WINDOW) -> None:
        self.window = window
        self._seen = 0  # finite losses on course
        self._level = 0.0
        self._deviation = 0.0
        self._widest = 0.0  # the largest deviation so far
        self._off = 0  # losses off course, one after another
        self._first = 0  # the step before the first of them
        self._back = 0  # losses that are back, less those that were not since
        self._since: int | None = None  # the step since which it is off course
        self._lasts = 0  # losses since then
        self._row = 0  # losses that are back, one after another
        self._unbroken = 0  # losses since the last so many of those

    @property
    def off_since(self) -> int | None:
        """The first step of a spike that is not over yet; None where all is well."""
        return self._since

    @property
    def doubtful_since(self) -> int | None:
        """The same, from the first loss that may turn out to be one."""
        return self._since if self._since is not None else self._first if self._off else None

    @property
    def off_for(self) -> int:
        """How many losses it has been off its course without a break: several in a row that are back are one."""
        return self._unbroken if self._since is not None else 0

    def see(self, loss: float, step: int) -> None:
        """The loss of the batch after ``step`` optimizer steps."""
        finite = math.isfinite(loss)
        if self._since is None:
            is_off = not finite or (self._seen >= WARM and loss - self._level > OFF * self._scatter)
            self._first = self._first if self._off else step
            self._off = self._off + 1 if is_off else 0
            if not finite or self._off >= IN_A_ROW:
                self._since, self._lasts, self._back = self._first, self._off, 0
                self._row, self._unbroken = 0, self._off
            elif not is_off:
                self._learn(loss)
            return
        self._lasts += 1
        is_back = finite and (self._seen < WARM or loss - self._level <= BACK * self._scatter)
        self._row = self._row + 1 if is_back else 0
        self._unbroken = self._unbroken + 1 if self._row < IN_A_ROW else 0
        # Losses scatter: one that is not back takes away a tenth of a window, not all that were.
        self._back = self._back + 1 if is_back else max(self._back - self.window // 10, 0)
        if self._back >= self.window:
            self._since, self._off = None, 0
        elif finite and self._lasts >= SETTLES * self.window:
            self._since, self._off, self._seen = None, 0, 0

    @property
    def _scatter(self) -> float:
        """The usual deviation, which is not nothing where a loss has been flat for a while, or always."""
        return max(self._deviation, self._widest / 100, abs(self._level) * 1e-6)

    def _learn(self, loss: float) -> None:
        """Take a loss into the past.  The level follows by at most a deviation, so that it is where most losses are."""
        self._seen += 1
        if self._seen == 1:
            self._level, self._deviation = loss, 0.0
            return
        rate = 1 / min(self._seen, self.window)
        away = loss - self._level
        bound = self._deviation if self._seen > self.window else math.inf
        self._deviation += (abs(away) - self._deviation) * rate
        self._widest = max(self._widest, self._deviation)
        self._level += min(max(away, -bound), bound) * min(2 * rate, 1.0)

    def forget_spike(self) -> None:
        """The run was taken back to before the spike."""
        self._since, self._off, self._back, self._lasts = None, 0, 0, 0

    def state(self) -> dict[str, Any]:
        """All of it, in plain values."""
        return {"window": self.window, **{name: getattr(self, name) for name in self._STATE}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken; with another window there is nothing to go on with."""
        if state.get("window") == self.window and all(name in state for name in self._STATE):
            for name in self._STATE:
                setattr(self, name, state[name])


@dataclass(frozen=True)
class Rollback:
    """Take a run that has diverged back to its last good checkpoint, and leave out the batches that did it.

    Parameters, optimizers, schedulers and callbacks go back; the data goes on where it is, so that the batches since
    that checkpoint are left out too.

    Args:
        patience: batches for which the loss is off course (or not finite) without a break before it counts.
        skip_batches: how many of the batches that follow are left out as well.
        most: how often in a run; then training stops with ``Diverged``.
    """

    patience: int = 50
    skip_batches: int = 0
    most: int = 3

    def __post_init__(self) -> None:
        for name, least in (("patience", 1), ("skip_batches", 0), ("most", 1)):
            value = getattr(self, name)
            if not is_whole(value, least):
                raise SetupError(f"Rollback({name}={value!r}): a whole number, {least} or more, is wanted.")
        if self.patience >= SETTLES * WINDOW:
            raise SetupError(
                f"Rollback(patience={self.patience}): a loss that stays elsewhere for {SETTLES * WINDOW} batches has a"
                " new course.",
                hint="Try patience=50.",
            )
