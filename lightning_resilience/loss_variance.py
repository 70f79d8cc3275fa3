"""The plain rule on the loss: save when it varies little, or is near its best, between a shortest and a longest time.

On realistic noise such a rule never fires late in training, or fires all the time; the two intervals are what makes it
usable.  ``AdaptiveSchedule`` needs no thresholds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_resilience.errors import SetupError
from lightning_resilience.numeric import is_number
from lightning_resilience.schedule import Decider, Decision, Progress, Schedule, check_seconds, check_window


@dataclass(frozen=True)
class LossVariance(Schedule):
    """Save when the training loss varies little, or is near the best there was.

    Args:
        threshold: variance of the last ``window`` losses below which a save is due; None for no such rule.
        near_best: distance of their mean from the lowest such mean within which a save is due; None for no such rule.
        window: how many losses.
        min_seconds: the shortest time between two saves.
        max_seconds: the longest: then a save is made whatever the loss does.

    Raises:
        SetupError: an argument is out of range.
    """

    threshold: float | None = 1e-4
    near_best: float | None = 0.01
    window: int = 100
    min_seconds: float = 60.0
    max_seconds: float = 1800.0

    def __post_init__(self) -> None:
        for name, value in (("threshold", self.threshold), ("near_best", self.near_best)):
            if value is not None and not is_number(value, 0):
                raise SetupError(f"LossVariance({name}={value!r}): a number from 0 is wanted, or None.")
        if self.threshold is None and self.near_best is None:
            raise SetupError(
                "LossVariance(threshold=None, near_best=None) has no rule.", hint="EverySeconds saves by time alone."
            )
        check_window("LossVariance", self.window)
        check_seconds("LossVariance", "min_seconds", self.min_seconds)
        check_seconds("LossVariance", "max_seconds", self.max_seconds, above=self.min_seconds)

    def due(self, now: Progress, last: Progress) -> str | None:
        """As in a run of which no loss is known."""
        decision = self.decider().decide(now, last)
        return decision.reason if decision else None

    def decider(self) -> LossVarianceDecider:
        return LossVarianceDecider(self)


class LossVarianceDecider(Decider):
    """One run as ``LossVariance`` follows it.  Losses that are not finite are passed over."""

    wants_losses = True

    def __init__(self, rule: LossVariance) -> None:
        super().__init__(rule)
        self._rule = rule
        self._losses: deque[float] = deque(maxlen=rule.window)
        self._finite = True
        self._mean = self._squares = 0.0  # of the window: mean, and sum of squared deviations from it
        self._best = math.inf
        self._until_exact = rule.window

    def see_loss(self, loss: float) -> None:
        self._finite = math.isfinite(loss)
        if not self._finite:
            return
        losses, window = self._losses, self._rule.window
        if len(losses) < window:
            losses.append(loss)
            if len(losses) == window:
                self._compute()
        else:
            # Welford's update with one value coming and one going.
            gone, before = losses[0], self._mean
            losses.append(loss)
            self._mean += (loss - gone) / window
            self._squares += (loss - gone) * (loss - self._mean + gone - before)
            self._until_exact -= 1
            if self._until_exact == 0:
                self._compute()
        if len(losses) == window:
            self._best = min(self._best, self._mean)

    def _compute(self) -> None:
        """Now and then exactly, so that rounding errors do not add up."""
        self._mean = math.fsum(self._losses) / len(self._losses)
        self._squares = math.fsum((loss - self._mean) ** 2 for loss in self._losses)
        self._until_exact = self._rule.window

    def decide(self, now: Progress, last: Progress, ahead: int = 0) -> Decision | None:
        rule, passed = self._rule, now.seconds - last.seconds
        if now.step <= last.step or passed < rule.min_seconds:
            return None
        if passed >= rule.max_seconds:
            return Decision(f"{passed:.1f} s since the last save")
        if not self._finite or len(self._losses) < rule.window:
            return None
        variance = max(self._squares, 0.0) / rule.window
        if rule.threshold is not None and variance < rule.threshold:
            return Decision(f"variance {variance:.3g} of the last {rule.window} losses, below {rule.threshold:g}")
        if rule.near_best is not None and self._mean <= self._best + rule.near_best:
            return Decision(f"mean loss {self._mean:.4g}, within {rule.near_best:g} of the best")
        return None

    def state(self) -> dict[str, Any]:
        return {
            "window": self._rule.window,
            "losses": list(self._losses),
            "finite": self._finite,
            "sums": [self._mean, self._squares, self._until_exact],
            "best": self._best,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        if "losses" not in state:
            return  # of another rule
        self._losses.extend(state["losses"])
        self._finite, self._best = state["finite"], state["best"]
        if state.get("window") == self._rule.window:
            self._mean, self._squares, self._until_exact = state["sums"]
        elif len(self._losses) == self._rule.window:
            self._compute()
