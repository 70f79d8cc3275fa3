"""What a schedule would cost: the schedule objects themselves, run against failures and losses that are drawn.

Time goes by in training steps; the stretches in which no save can be due are passed over.  A run is wasted time in
three ways: it stands still while a save is staged, work since the last *committed* save is done again after a failure,
and restarting takes time.  Work that is lost is counted as its expectation, the integral of (progress at risk / MTBF)
over the run, instead of by where the failures happened to fall, so that a few failures say as much as many would; the
failures that are drawn are what the schedule learns from.

For a fixed interval I the waste is about C/I + (I/2 + D + R)/M, with C the stall of a save, D the seconds until it is
committed, R those of a restart and M the mean time between failures: least at I = √(2·C·M), the interval of Young and
Daly, which an *oracle* knows beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from lightning_resilience.adaptive import AdaptiveDecider, AdaptiveSchedule
from lightning_resilience.schedule import Decider, EverySeconds, Progress, Schedule

DAY = 86400.0
BLOCK = 4096
"""Losses that are drawn at once."""


@dataclass(frozen=True)
class Setting:
    """A run to simulate; all times in seconds.

    Args:
        mtbf: mean time between failures; they come at a constant rate.
        stall: how long a save keeps training still.
        commit: from the start of a save until it is committed.
        step: one training step.
        restart: from a failure until training goes on.
        duration: of the run, wall time.
        noise: standard deviation of the loss, which falls from 2 to 1 in about ``decay`` steps.
        decay: see ``noise``.
    """

    mtbf: float
    stall: float
    commit: float
    step: float = 1.0
    restart: float = 120.0
    duration: float = 30 * DAY
    noise: float = 0.05
    decay: float = 20_000.0

    @property
    def oracle(self) -> float:
        """The interval of Young and Daly."""
        return math.sqrt(2 * self.stall * self.mtbf)

    def waste(self, interval: float) -> float:
        """About what saves at a fixed interval waste, as a share of the time; see the module's docstring."""
        return self.stall / interval + (interval / 2 + self.commit + self.restart) / self.mtbf

    def oracle_within(self, rule: AdaptiveSchedule) -> float:
        """The same for somebody who has given the promises of ``rule`` too."""
        least = max(self.stall / rule.max_overhead, self.commit)
        return min(max(self.oracle, least), max(rule.rpo_seconds - self.commit - self.step, rule.rpo_seconds / 2))


@dataclass(frozen=True)
class Outcome:
    """How a run went: shares of the wall time that were wasted and on what, and the gaps between saves in seconds."""

    stalled: float
    lost: float
    restarting: float
    saves: int
    failures: int
    mean_gap: float
    longest_gap: float

    @property
    def waste(self) -> float:
        """Share of the wall time in which no progress was made that lasted; at most all of it, where what is expected
        to be lost is more than there was."""
        return min(self.stalled + self.lost + self.restarting, 1.0)


def failures_of(setting: Setting, seed: int) -> list[float]:
    """Wall times of the failures of one run, the same for every schedule."""
    rng = np.random.default_rng([seed, 1])
    times: list[float] = []
    now = 0.0
    while now < setting.duration:
        now += float(rng.exponential(setting.mtbf))
        times.append(now)
        now += setting.restart  # nothing fails that does not run
    return times


Told = Callable[[float], None]
"""Hears of seconds that were simulated."""


def _nobody(seconds: float) -> None:
    """Nobody is told."""


def simulate(schedule: Schedule, setting: Setting, seed: int = 0, tell: Told = _nobody) -> Outcome:
    """Run ``schedule`` once."""
    return _Run(schedule, setting, seed, tell).outcome()


def average(schedule: Schedule, setting: Setting, seeds: Sequence[int] = range(4), tell: Told = _nobody) -> Outcome:
    """The mean of several runs; the longest gap of all."""
    outcomes = [simulate(schedule, setting, seed, tell) for seed in seeds]

    def mean(name: str) -> float:
        return float(np.mean([getattr(outcome, name) for outcome in outcomes]))

    return Outcome(
        mean("stalled"),
        mean("lost"),
        mean("restarting"),
        round(mean("saves")),
        round(mean("failures")),
        mean("mean_gap"),
        max(outcome.longest_gap for outcome in outcomes),
    )


class _Run:
    """One run of one schedule."""

    def __init__(self, schedule: Schedule, setting: Setting, seed: int, tell: Told) -> None:
        self._tell = tell
        self._schedule, self._setting = schedule, setting
        self._losses = _losses(setting, seed)
        self._failures = failures_of(setting, seed)
        self._gaps: list[float] = []
        self._stalled = self._risk = self._running = 0.0

    def outcome(self) -> Outcome:
        setting = self._setting
        decider, state, begin, trained = self._schedule.decider(), None, 0.0, 0.0
        for failures, failure in enumerate(self._failures):
            end = min(failure, setting.duration)
            decider = self._schedule.decider()
            if state is not None:
                decider.restore(state)
                decider.see_start()
            decider.see_failures(failures, trained)
            state = self._live(decider, begin, end, state)
            trained += end - begin
            begin = end + setting.restart
            if begin >= setting.duration:
                break
        wall, count = setting.duration, sum(failure < setting.duration for failure in self._failures)
        return Outcome(
            self._stalled / wall,
            self._risk / setting.mtbf / wall,
            self._running / setting.mtbf * setting.restart / wall,
            len(self._gaps),
            count,
            float(np.mean(self._gaps)) if self._gaps else wall,
            max(self._gaps, default=0.0),
        )

    def _live(self, decider: Decider, begin: float, end: float, state: dict[str, Any] | None) -> dict[str, Any] | None:
        """From a start to the failure that ends it; the state of the last committed save."""
        setting = self._setting
        now, steps = begin, 0
        last, last_gap = Progress(0, begin), 0.0
        pending: tuple[float, dict[str, Any]] | None = None
        self._running += end - begin
        looks_ahead = True
        while True:
            skip = 0
            if looks_ahead:
                skip = min(int(_quiet(decider, now, last) / setting.step) - 1, int((end - now) / setting.step))
            looks_ahead = False
            if skip > 1:
                now, steps = now + skip * setting.step, steps + skip
                for loss in islice(self._losses, min(skip, 2 * _window(decider)) if decider.wants_losses else 0):
                    decider.see_loss(loss)
            now, steps = now + setting.step, steps + 1
            if pending is not None and now >= pending[0]:
                state = pending[1]
                decider.see_save(setting.stall, setting.commit)
                pending = None
                looks_ahead = True
            if now >= end:
                self._count(end - last.seconds, last_gap)
                if end >= setting.duration:
                    self._gaps.append(end - last.seconds)
                return state
            if decider.wants_losses:
                decider.see_loss(next(self._losses))
            decision = decider.decide(Progress(steps, now), last)
            if decision is None or pending is not None:
                continue
            gap = now - last.seconds
            self._gaps.append(gap)
            self._count(gap, last_gap)
            pending = now + setting.commit, decider.state()
            decider.see_start()
            last, last_gap = Progress(steps, now), gap
            self._stalled += setting.stall
            now += setting.stall
            looks_ahead = True

    def _count(self, gap: float, before: float) -> None:
        """The progress at risk, over the time between the starts of two saves: until the first of them is committed,
        that since the save before it too."""
        self._risk += gap * gap / 2 + before * min(self._setting.commit, gap)
        self._tell(gap)


def _quiet(decider: Decider, now: float, last: Progress) -> float:
    """Seconds from ``now`` in which no save is due, whatever happens; 0 where that is not known."""
    if isinstance(decider, AdaptiveDecider):
        return last.seconds + decider.quiet(now) - now
    if isinstance(decider.rule, EverySeconds):
        return last.seconds + decider.rule.seconds - now
    return 0.0


def _window(decider: Decider) -> int:
    return decider.trend.window if isinstance(decider, AdaptiveDecider) else 0


def _losses(setting: Setting, seed: int) -> Iterator[float]:
    """Training losses, one a step."""
    rng = np.random.default_rng([seed, 2])
    step = 0
    while True:
        noise = rng.normal(0.0, setting.noise, BLOCK)
        trend = 1.0 + np.exp(-np.arange(step, step + BLOCK) / setting.decay)
        yield from (trend + noise).tolist()
        step += BLOCK
