"""What a schedule knows of the loss: how much it scatters now, beside how much it usually does, and where it is going.

Everything is a running mean with a fixed number of values, so a step costs about a microsecond and the state is small
enough for every checkpoint.  Only differences and ratios of losses are used, so that scaling or shifting the loss
changes nothing.

Outliers are bounded: the loss is followed by at most ``BOUND`` usual deviations a step, so one spike counts as one
unusual step, whatever its height, while a lasting change is followed within a few.  Losses that are not finite are
passed over: they say that the loss is not calm, and nothing about how it scatters.

Scatter is the mean absolute difference of consecutive losses, which a slow trend leaves alone; for independent normal
noise the standard deviation is √π/2 of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

BOUND = 8.0
"""Usual deviations by which the loss is followed in one step."""
WARM = 16
"""Losses after which there is a usual deviation."""
LONG = 10
"""Windows in the long run."""
MOST = 4.0
"""The largest volatility that is told."""
ROUGH = 2.0
"""Volatility from which on nothing is a milestone."""
SIGNIFICANT = 3.0
"""Standard errors by which a smoothed loss has to differ to be another."""


class LossTrend:
    """Follows one loss.

    Args:
        window: losses that "now" is made of; the long run is ten times that.
    """

    __slots__ = (
        "_best",
        "_finite",
        "_level",
        "_long",
        "_low",
        "_mean",
        "_on_plateau",
        "_seen",
        "_short",
        "_since_low",
        "_slow_mean",
        "window",
    )
    _STATE = tuple(name for name in __slots__ if name.startswith("_"))

    def __init__(self, window: int) -> None:
        self.window = window
        self._seen = 0  # finite losses so far
        self._finite = True  # whether the last one was
        self._level = 0.0  # the loss, followed
        self._short = 0.0  # scatter now
        self._long = 0.0  # usual scatter
        self._mean = 0.0  # smoothed loss
        self._slow_mean = 0.0  # the same over the long run
        self._best = math.inf  # smoothed loss of the last milestone
        self._low = math.inf  # lowest smoothed loss, by more than its error
        self._since_low = 0  # losses since then
        self._on_plateau = False  # whether this plateau has had its milestone

    def see(self, loss: float) -> None:
        """The next loss."""
        if not math.isfinite(loss):
            self._finite = False
            return
        self._finite = True
        self._seen = seen = self._seen + 1
        if seen == 1:
            self._level = self._mean = self._slow_mean = loss
            return
        change = loss - self._level
        if seen > WARM and self._long > 0.0:
            bound = BOUND * self._long
            change = bound if change > bound else -bound if change < -bound else change
        self._level = level = self._level + change
        window = self.window
        long_window = LONG * window
        scatter = change if change >= 0.0 else -change
        before = seen - 1
        self._short += (scatter - self._short) / (window if before > window else before)
        self._long += (scatter - self._long) / (long_window if before > long_window else before)
        self._mean = mean = self._mean + (level - self._mean) / (window if seen > window else seen)
        self._slow_mean += (level - self._slow_mean) / (long_window if seen > long_window else seen)
        if seen < window:
            return
        self._since_low += 1
        if seen == window:
            self._best = mean
        if mean < self._low and mean < self._low - SIGNIFICANT * self.error:  # the first is quick, and rarely so
            self._low, self._since_low, self._on_plateau = mean, 0, False

    @property
    def known(self) -> bool:
        """Whether there have been enough losses to say anything."""
        return self._seen >= self.window

    @property
    def error(self) -> float:
        """Standard error of the smoothed loss: a running mean over w values has the variance of 2·w independent ones
        (to within 1/w)."""
        return math.sqrt(math.pi) / 2 * self._long / math.sqrt(2 * self.window)

    @property
    def volatility(self) -> float:
        """How many times its usual scatter the loss has now, from 1 to ``MOST``."""
        if not self.known or self._short <= self._long:
            return 1.0
        return min(self._short / self._long, MOST)

    def is_calm(self, share: float = 1.0) -> bool:
        """Whether the last loss was finite, and the scatter is at most this share of the usual one."""
        return self._finite and self._short <= share * self._long

    def milestone(self) -> str | None:
        """Why a checkpoint of this moment would be a milestone; None where it would not.

        Either the smoothed loss is lower than at the last milestone by more than its error, or it has stopped falling:
        for a long run it has found no new low and is where it was on average.  A plateau has one milestone.
        """
        if not self.known or not self._finite or self.volatility >= ROUGH:
            return None
        margin = SIGNIFICANT * self.error
        if self._mean < self._best - margin:
            return f"best smoothed loss, {self._mean:.4g}"
        flat = self._since_low >= LONG * self.window and abs(self._mean - self._slow_mean) <= margin
        return f"plateau, smoothed loss {self._mean:.4g}" if flat and not self._on_plateau else None

    def take(self) -> None:
        """This moment was saved."""
        if self.milestone() is not None:
            self._on_plateau = self._since_low >= LONG * self.window
            self._best = min(self._best, self._mean)

    def state(self) -> dict[str, Any]:
        """All of it, in plain values."""
        return {"window": self.window, **{name[1:]: getattr(self, name) for name in self._STATE}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken; with another window there is nothing to go on with."""
        if state.get("window") == self.window and all(name[1:] in state for name in self._STATE):
            for name in self._STATE:
                setattr(self, name, state[name[1:]])
