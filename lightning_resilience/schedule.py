"""When to save: small frozen rules that answer with a reason, combined by any-of.

A schedule is asked after every training batch, ``schedule.due(now, last)``, with two :class:`Progress` values: where
training is, and where it was at the last save that was started.  It answers None, or why a save is due.  It reads no
clock, talks to nobody and keeps nothing, so a test is a table.

``EverySteps`` depends on nothing but the step, which is the same on all ranks, so every rank decides it alone and at
exactly that step.  Rules that depend on time are decided by rank 0 and agreed on by all (``by_step_alone``, see
``callback`` and ``agreement``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

from lightning_resilience.errors import SetupError


@dataclass(frozen=True)
class Progress:
    """A moment of training: ``step`` in optimizer steps (batches where those do not move), ``seconds`` of a monotonic
    clock."""

    step: int
    seconds: float


class Schedule(ABC):
    """Decides when a save is due.  Subclass it for a rule of your own: ``due`` is enough."""

    @abstractmethod
    def due(self, now: Progress, last: Progress) -> str | None:
        """Why a save is due at ``now`` when the last one was started at ``last``; None where it is not."""

    def by_step_alone(self) -> Schedule | None:
        """The part of this rule that depends on the step alone, which each rank may decide for itself."""
        return None

    def by_agreement(self) -> Schedule | None:
        """The part of this rule that ranks may see differently, so that one has to decide for all."""
        return self


@dataclass(frozen=True)
class EverySteps(Schedule):
    """Save at every ``n``-th step (a multiple of ``n``, as ``every_n_train_steps``)."""

    n: int

    def __post_init__(self) -> None:
        if isinstance(self.n, bool) or not isinstance(self.n, int) or self.n < 1:
            raise SetupError(
                f"EverySteps(n={self.n!r}): n is a number of steps, 1 or more.", hint="Try EverySteps(1000)."
            )

    def due(self, now: Progress, last: Progress) -> str | None:
        return f"every {self.n} steps" if now.step > last.step and now.step % self.n == 0 else None

    def by_step_alone(self) -> EverySteps:
        return self

    def by_agreement(self) -> None:
        return None


@dataclass(frozen=True)
class EverySeconds(Schedule):
    """Save once ``seconds`` have passed since the last save was started."""

    seconds: float

    def __post_init__(self) -> None:
        seconds: object = self.seconds
        if isinstance(seconds, timedelta):
            object.__setattr__(self, "seconds", seconds.total_seconds())
        elif isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
            raise SetupError(f"EverySeconds(seconds={seconds!r}): a number of seconds is wanted.")
        if not 0 <= self.seconds < float("inf"):
            raise SetupError(
                f"EverySeconds(seconds={self.seconds!r}): seconds must be finite and not negative.",
                hint="Try EverySeconds(300).",
            )

    def due(self, now: Progress, last: Progress) -> str | None:
        passed = now.seconds - last.seconds
        return f"{passed:.1f} s since the last save" if now.step > last.step and passed >= self.seconds else None


@dataclass(frozen=True, init=False)
class FirstOf(Schedule):
    """Save when any of ``schedules`` says so: ``FirstOf(EverySteps(1000), EverySeconds(600))``."""

    schedules: tuple[Schedule, ...]

    def __init__(self, *args: Schedule, schedules: Iterable[Schedule] = ()) -> None:
        if not isinstance(schedules, Iterable):
            raise SetupError(f"FirstOf(schedules={schedules!r}): a list of schedules is wanted.")
        parts = (*args, *schedules)
        if not parts:
            raise SetupError("FirstOf() needs at least one schedule.", hint="Try FirstOf(EverySteps(1000)).")
        for part in parts:
            check_schedule(part)
        object.__setattr__(self, "schedules", parts)

    def __repr__(self) -> str:
        return f"FirstOf({', '.join(map(repr, self.schedules))})"

    def due(self, now: Progress, last: Progress) -> str | None:
        reasons = [reason for part in self.schedules if (reason := part.due(now, last))]
        return "; ".join(reasons) or None

    def by_step_alone(self) -> Schedule | None:
        return _any_of(part.by_step_alone() for part in self.schedules)

    def by_agreement(self) -> Schedule | None:
        return _any_of(part.by_agreement() for part in self.schedules)


class Never(Schedule):
    """No saves but those that epochs, validations and the end of training ask for."""

    def __repr__(self) -> str:
        return "Never()"

    def due(self, now: Progress, last: Progress) -> None:
        return None


def check_schedule(schedule: object) -> None:
    """Raise SetupError unless ``schedule`` is one."""
    if isinstance(schedule, type) or not isinstance(schedule, Schedule):
        raise SetupError(
            f"{schedule!r} is not a schedule.", hint="Use EverySteps(1000), EverySeconds(300) or FirstOf(…)."
        )


def _any_of(parts: Iterable[Schedule | None]) -> Schedule | None:
    present = [part for part in parts if part is not None]
    return FirstOf(*present) if present else None
