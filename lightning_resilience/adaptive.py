"""The adaptive schedule: save when it pays, by measured cost, measured failure rate, and the loss.

The interval between two saves that wastes least is √(2·C·M) [Young 1974; Daly 2006], with C the seconds that a save
keeps training still and M the mean time between failures.  Around it stand the promises that the user was given::

    interval  =  √(2·C·M/h)     h from 1 to 4: how many times its usual scatter the loss has now
    at least     C/q            the overhead budget: saves take at most the share q of the time
                 D              the time until a save is committed, because there is one save at a time
    at most      RPO            the most progress to put at risk: what is not committed yet is less than that, so
                                the save has to begin D, and the time that deciding takes, before it

Where the promises contradict each other, the RPO is kept.  From 0.7 of the interval on a calm loss picks the moment:
the earlier, the calmer it has to be.  At 1.4 of it the save is made anyway.

C and D are means of the last saves.  The first save of a process is left out as soon as there are others: it plans and
allocates what all later ones use again.  A run that has never saved does so after half a minute, if not before.

M is the mean of a Gamma distribution over failure rates that has seen n failures in T seconds of training:
(b + T) / (a + n).  The shape a is 1/2 (Jeffreys).  b is a tenth of the prior, which makes the first M a fifth of it: a
rate that was taken for too high is put right by time that passes without a failure, one that was taken for too low only
by failures.  Of the shapes and scales that were tried, this one wasted least in the worst case of priors that are wrong
by a factor of ten either way.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightning_resilience.errors import SetupError
from lightning_resilience.loss_trend import MOST, LossTrend
from lightning_resilience.manifest import MILESTONE
from lightning_resilience.numeric import is_number
from lightning_resilience.schedule import Decider, Decision, Progress, Schedule, check_seconds, check_window

EARLIEST, LATEST = 0.7, 1.4
"""Shares of the interval between which the loss picks the moment."""
USUAL = 0.9
"""Share of the interval from which on the usual scatter of the loss is calm enough, so that saves come at the interval
on average."""
PATIENCE = 0.25
"""Seconds between two looks at the clock where no loss has come."""
MARGIN = 1.5
"""Usual steps that one of those may take which a decision has to wait for."""
RECENT = 8
"""Saves whose cost counts."""
FIRST_STALL = 1.0
"""Seconds that a save is taken to cost before there was one."""
FIRST_SAVE = 30.0
"""Seconds after which a run saves that has never saved: what that costs is what the interval goes by."""
SHAPE, SCALE = 0.5, 0.1
"""Of the Gamma distribution over failure rates before anything is known: its shape, and its inverse scale as a share of
the prior."""


@dataclass(frozen=True)
class AdaptiveSchedule(Schedule):
    """Save at the interval that wastes least time, at a moment when the loss is calm, within two promises.

    Args:
        max_overhead: the largest share of the time that saves may keep training still.
        rpo_seconds: recovery point objective: the most progress, in seconds of training, that a failure may cost.  It
            goes before ``max_overhead`` where both cannot be kept.
        window: training losses that say how calm the loss is; the usual scatter is that of ten times as many.
        prior_mtbf_seconds: the mean time between failures to begin with; what is observed soon outweighs it.

    Raises:
        SetupError: an argument is out of range.
    """

    max_overhead: float = 0.01
    rpo_seconds: float = 1800.0
    window: int = 100
    prior_mtbf_seconds: float = 86400.0

    def __post_init__(self) -> None:
        if not is_number(self.max_overhead) or not 0 < self.max_overhead < 1:
            raise SetupError(
                f"AdaptiveSchedule(max_overhead={self.max_overhead!r}): a share between 0 and 1 is wanted.",
                hint="0.01 lets saves take one percent of the time.",
            )
        check_seconds("AdaptiveSchedule", "rpo_seconds", self.rpo_seconds)
        check_seconds("AdaptiveSchedule", "prior_mtbf_seconds", self.prior_mtbf_seconds)
        check_window("AdaptiveSchedule", self.window)

    def due(self, now: Progress, last: Progress) -> str | None:
        """As in a run of which nothing is known yet."""
        decision = self.decider().decide(now, last)
        return decision.reason if decision else None

    def decider(self) -> AdaptiveDecider:
        return AdaptiveDecider(self)


class Plan(NamedTuple):
    """When the next save is to be started, in seconds since the last one.

    Args:
        interval: what is aimed at.
        earliest: from here on a calm loss picks the moment.
        latest: here it is made anyway.
        at_risk: whether ``latest`` is there because of the RPO.
    """

    interval: float
    earliest: float
    latest: float
    at_risk: bool


def mean_time_between_failures(prior: float, failures: int, seconds: float) -> float:
    """Seconds, after so many failures in so many seconds of training; see the module's docstring."""
    return (SCALE * prior + seconds) / (SHAPE + failures)


class AdaptiveDecider(Decider):
    """One run as an ``AdaptiveSchedule`` follows it."""

    wants_losses = True

    def __init__(self, rule: AdaptiveSchedule) -> None:
        super().__init__(rule)
        self._rule = rule
        self.trend = LossTrend(rule.window)
        self._costs: deque[tuple[float, float]] = deque(maxlen=RECENT)
        self._stall, self._seconds = FIRST_STALL, 0.0
        self._saves = 0  # of this process
        self._has_tried = False
        self._failures, self._trained = 0, 0.0
        self._begun: float | None = None
        self._asked = 0.0
        self._asked_since, self._asked_times = 0.0, 0  # since steps were measured
        self._step_seconds = self._longest_step = 0.0
        self._deaf_until = self._wait_until = -math.inf  # nothing is due until then: whatever comes; without a new loss

    # -- what it is told ----------------------------------------------------------------------------------------------

    def see_loss(self, loss: float) -> None:
        self.trend.see(loss)
        self._wait_until = -math.inf

    @property
    def _is_first(self) -> bool:
        """Whether the run has never saved, nor tried to."""
        return not (self._costs or self._has_tried)

    def see_start(self) -> None:
        self._has_tried = True
        self.trend.take()
        self._deaf_until = -math.inf

    def see_save(self, stall: float, seconds: float) -> None:
        self._saves += 1
        first, before = self._saves == 1, len(self._costs)
        if first and before:
            return
        if self._saves == 2 and before == 1:
            self._costs.clear()  # the only one there was is this process's first
        self._costs.append((stall, seconds))
        self._average()
        self._deaf_until = -math.inf

    def _average(self) -> None:
        self._stall = sum(stall for stall, _ in self._costs) / len(self._costs)
        self._seconds = sum(seconds for _, seconds in self._costs) / len(self._costs)

    def see_failures(self, failures: int, seconds: float) -> None:
        self._failures, self._trained, self._begun = failures, seconds, None

    def marks(self) -> Mapping[str, str]:
        why = self.trend.milestone()
        return {MILESTONE: why} if why is not None else {}

    # -- what it decides ----------------------------------------------------------------------------------------------

    def mtbf(self, now: float) -> float:
        """Mean seconds between failures, as known at the monotonic second ``now``."""
        trained = self._trained + (now - self._begun if self._begun is not None else 0.0)
        return mean_time_between_failures(self._rule.prior_mtbf_seconds, self._failures, trained)

    def plan(self, now: float, ahead: int = 0) -> Plan:
        """When the next save is to be started; see ``decide`` for the arguments."""
        rule, rpo = self._rule, self._rule.rpo_seconds
        interval = math.sqrt(2 * self._stall * self.mtbf(now) / self.trend.volatility)
        least = max(self._stall / rule.max_overhead, self._seconds)
        # Half the RPO is left to a save that takes, or has to wait, longer than the promise allows for.
        lead = self._seconds + MARGIN * ahead * self._step_seconds + self._longest_step + PATIENCE
        most = max(rpo - lead, rpo / 2)
        interval = min(max(interval, least), most)
        if self._is_first and interval > FIRST_SAVE:
            return Plan(FIRST_SAVE, earliest=FIRST_SAVE, latest=FIRST_SAVE, at_risk=False)
        return Plan(
            interval,
            earliest=min(max(EARLIEST * interval, least), most),
            latest=min(LATEST * interval, most),
            at_risk=LATEST * interval >= most,
        )

    def decide(self, now: Progress, last: Progress, ahead: int = 0) -> Decision | None:
        seconds = now.seconds
        if seconds - self._asked > self._longest_step and self._begun is not None:
            self._longest_step = seconds - self._asked
        self._asked = seconds
        self._asked_times += 1
        if seconds < self._deaf_until or seconds < self._wait_until or now.step <= last.step:
            return None
        self._measure_steps(seconds)
        decision = self._decide(seconds, seconds - last.seconds, ahead)
        if decision is None:  # what was decided stays so until the save is made
            self._deaf_until, self._wait_until = last.seconds + self.quiet(seconds), seconds + PATIENCE
        return decision

    def _decide(self, seconds: float, passed: float, ahead: int) -> Decision | None:
        plan = self.plan(seconds, ahead)
        if passed < plan.earliest:
            return None
        trend = self.trend
        if passed >= plan.latest:
            late = "the loss not calm" if trend.known and not self._is_first else ""
            why = "the most to put at risk" if plan.at_risk else late
        elif trend.known and trend.is_calm(min(passed / plan.interval / USUAL, 1.0)):
            why = "the loss calm"
        elif not trend.known and passed >= plan.interval:
            why = ""
        else:
            return None
        return Decision(f"{passed:.1f} s since the last save" + (f", {why}" if why else ""), tuple(self.marks()))

    def quiet(self, now: float) -> float:
        """Seconds since the last save before which none is due, whatever loss and step times become from ``now`` on."""
        least = EARLIEST * math.sqrt(2 * self._stall * self.mtbf(now) / MOST)
        if self._is_first:
            least = min(least, FIRST_SAVE)
        return min(least, self._rule.rpo_seconds / 2 * EARLIEST)

    def _measure_steps(self, now: float) -> None:
        """How long steps take that are asked after: on average without what is unusual, and at the most lately."""
        if self._begun is None:
            self._begun = now
        elif self._asked_times:
            taken, usual = (now - self._asked_since) / self._asked_times, self._step_seconds
            weight = min(self._asked_times / 32, 1.0)
            self._step_seconds = taken if usual == 0.0 else usual + weight * (min(taken, 3 * usual) - usual)
            self._longest_step *= 0.98**self._asked_times
        self._asked_since, self._asked_times = now, 0

    # -- state --------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {"costs": [list(cost) for cost in self._costs], "trend": self.trend.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._costs.extend((float(stall), float(seconds)) for stall, seconds in state.get("costs", ()))
        if self._costs:
            self._average()
        self.trend.restore(state.get("trend", {}))
