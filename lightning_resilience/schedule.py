"""When to save: small frozen rules that answer with a reason, combined by any-of.

A rule is asked after every training batch with two :class:`Progress` values: where training is, and where it was at
the last save that was started.  It answers None, or why a save is due.  It reads no clock, talks to nobody and keeps
nothing, so a test is a table::

    schedule.due(now, last)             the rule itself; all that a rule of your own needs
    schedule.decider()                  one run as the rule follows it: is told of losses, of what saves cost and of
                                        failures, keeps what it needs of them, and decides with a reason and labels

``EverySteps`` depends on nothing but the step, which is the same on all ranks, so every rank decides it alone and at
exactly that step.  Rules that depend on time or on the loss are decided by rank 0 and agreed on by all
(``by_step_alone``, see ``decisions`` and ``agreement``).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from lightning_resilience.errors import SetupError
from lightning_resilience.numeric import is_number, is_whole


@dataclass(frozen=True)
class Progress:
    """A moment of training: ``step`` in optimizer steps (batches where those do not move), ``seconds`` of a monotonic
    clock."""

    step: int
    seconds: float


@dataclass(frozen=True)
class Decision:
    """A save is due: why, and what the checkpoint is to be labelled, such as ``milestone``."""

    reason: str
    labels: tuple[str, ...] = ()


class Schedule(ABC):
    """Decides when a save is due.  Subclass it for a rule of your own: ``due`` is enough."""

    @abstractmethod
    def due(self, now: Progress, last: Progress) -> str | None:
        """Why a save is due at ``now`` when the last one was started at ``last``; None where it is not."""

    def decider(self) -> Decider:
        """This rule at the beginning of a run, for a rule that goes by what happens in it."""
        return Decider(self)

    def by_step_alone(self) -> Schedule | None:
        """The part of this rule that depends on the step alone, which each rank may decide for itself."""
        return None

    def by_agreement(self) -> Schedule | None:
        """The part of this rule that ranks may see differently, so that one has to decide for all."""
        return self


class Decider:
    """One run as a rule follows it, on rank 0.  This one keeps nothing and goes by ``rule.due`` alone.

    It reads no clock either: it is told of everything that it goes by, in the order in which it happens.  ``decide``
    changes nothing that a decision depends on, because what it asks for may have to wait; ``see_start`` tells of a save
    that was made.
    """

    wants_losses = False
    """Whether it goes by losses."""

    def __init__(self, rule: Schedule) -> None:
        self.rule = rule

    def decide(self, now: Progress, last: Progress, ahead: int = 0) -> Decision | None:
        """Whether a save is due.

        Args:
            now: where training is.
            last: where it was when the last save was started.
            ahead: how many more batches it may take until a save that is decided on now can be made.
        """
        reason = self.rule.due(now, last)
        return Decision(reason) if reason else None

    def marks(self) -> Mapping[str, str]:
        """Labels for a checkpoint that is saved now, whoever asked for it, and why it gets them."""
        return {}

    def see_loss(self, loss: float) -> None:
        """The loss of the next training batch; told some batches late, in order.  It may be infinite or NaN."""

    def see_start(self) -> None:
        """A save was started with the ``marks`` of this moment."""

    def see_save(self, stall: float, seconds: float) -> None:
        """A save was committed: training stood still for ``stall`` seconds, and it took ``seconds`` in all."""

    def see_failures(self, failures: int, seconds: float) -> None:
        """The run has failed so many times in so many seconds of training before now."""

    def state(self) -> dict[str, Any]:
        """What to keep in a checkpoint: plain values."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken; what is of another kind of rule is passed over."""


@dataclass(frozen=True)
class EverySteps(Schedule):
    """Save at every ``n``-th step (a multiple of ``n``, as ``every_n_train_steps``)."""

    n: int

    def __post_init__(self) -> None:
        if not is_whole(self.n, 1):
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
        elif not is_number(seconds):
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

    def decider(self) -> Decider:
        return _Deciders(self, [part.decider() for part in self.schedules])

    def by_step_alone(self) -> Schedule | None:
        return _any_of(part.by_step_alone() for part in self.schedules)

    def by_agreement(self) -> Schedule | None:
        return _any_of(part.by_agreement() for part in self.schedules)


class _Deciders(Decider):
    """The deciders of several rules: a save is due when it is for any of them, and all of them hear of everything."""

    def __init__(self, rule: FirstOf, parts: list[Decider]) -> None:
        super().__init__(rule)
        self._parts = parts
        self.wants_losses = any(part.wants_losses for part in parts)

    def decide(self, now: Progress, last: Progress, ahead: int = 0) -> Decision | None:
        decisions = [decision for part in self._parts if (decision := part.decide(now, last, ahead))]
        if not decisions:
            return None
        return Decision("; ".join(decision.reason for decision in decisions), tuple(self.marks()))

    def marks(self) -> Mapping[str, str]:
        return {label: why for part in reversed(self._parts) for label, why in part.marks().items()}

    def see_loss(self, loss: float) -> None:
        for part in self._parts:
            if part.wants_losses:
                part.see_loss(loss)

    def see_start(self) -> None:
        for part in self._parts:
            part.see_start()

    def see_save(self, stall: float, seconds: float) -> None:
        for part in self._parts:
            part.see_save(stall, seconds)

    def see_failures(self, failures: int, seconds: float) -> None:
        for part in self._parts:
            part.see_failures(failures, seconds)

    def state(self) -> dict[str, Any]:
        return {"parts": [part.state() for part in self._parts]}

    def restore(self, state: Mapping[str, Any]) -> None:
        for part, saved in zip(self._parts, state.get("parts", ()), strict=False):
            part.restore(saved)


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
            f"{schedule!r} is not a schedule.",
            hint="Use AdaptiveSchedule(), EverySteps(1000), EverySeconds(300) or FirstOf(…).",
        )


def check_seconds(rule: str, name: str, value: object, *, above: float = 0.0) -> None:
    """Raise SetupError unless ``value`` is a finite number larger than ``above``."""
    if not is_number(value) or not above < value < math.inf:
        raise SetupError(f"{rule}({name}={value!r}): a finite number of seconds larger than {above:g} is wanted.")


def check_window(rule: str, window: object) -> None:
    """Raise SetupError unless ``window`` is a number of losses."""
    if not is_whole(window, 2):
        raise SetupError(f"{rule}(window={window!r}): a number of losses is wanted, 2 or more.", hint="Try window=100.")


def _any_of(parts: Iterable[Schedule | None]) -> Schedule | None:
    present = [part for part in parts if part is not None]
    return FirstOf(*present) if present else None
