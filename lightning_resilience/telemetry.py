"""What checkpoints cost a run and what they are worth, in numbers: for the Trainer's loggers, and for one summary.

``Telemetry`` counts on rank 0, in the training thread: what ``Watch`` tells it, and how long steps take with
and without a save under way.  It reads no clock and talks to nobody.

*Goodput* is the share of wall time, since the run first began, in which training made progress that lasted: not the
time a run was down, nor what saves kept it still, nor the steps that were done again or that a run was taken back from.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from lightning_resilience.console import human_size
from lightning_resilience.ledger import Folded, Record

PREFIX = "resilience/"
"""Of every name that loggers see."""
STEPS = 200
"""Steps of each kind whose times are remembered."""
ENOUGH = 5
"""Steps of each kind from which on they are compared."""


@dataclass(frozen=True)
class Before:
    """The lives of this run that ended: when the first ``began`` (seconds since 1970), the ``useful`` seconds of
    training of all of them, and how many there were (``restarts``)."""

    began: float
    useful: float = 0.0
    restarts: int = 0


@dataclass(frozen=True)
class Cost:
    """What one save cost: ``stall`` and ``stage`` of the training thread and ``persist`` in the background, in seconds,
    and ``bytes`` of all ranks together."""

    stall: float
    stage: float
    persist: float
    bytes: int


class Telemetry:
    """Counts over one fit.

    Args:
        before: the lives before this one.
        now: seconds since 1970 at which this one began.
    """

    def __init__(self, before: Before | None, now: float) -> None:
        self._before = before or Before(now)
        self._alone: deque[float] = deque(maxlen=STEPS)
        self._beside: deque[float] = deque(maxlen=STEPS)
        self._stalls: list[float] = []
        self._persists: list[float] = []
        self._upload_bytes = 0
        self._hot_bytes = 0
        self._lag = 0.0
        self._suspect = 0
        self._replicated = 0
        self.skipped = 0
        self.failures = 0

    # -- what happens -------------------------------------------------------------------------------------------------

    def step(self, seconds: float, saving: bool) -> None:
        """A batch was trained on, while a save was under way or not."""
        (self._beside if saving else self._alone).append(seconds)

    def committed(self, cost: Cost, healthy: bool) -> None:
        """A save was committed."""
        self._stalls.append(cost.stall)
        self._persists.append(cost.persist)
        self._hot_bytes += cost.bytes
        self._suspect += not healthy

    def replicated(self, sent: int, lag: float) -> None:
        """A checkpoint got into the cold tier, ``lag`` seconds after its commit."""
        self._replicated += 1
        self._upload_bytes += sent
        self._lag = max(self._lag, lag)

    # -- what comes of it ---------------------------------------------------------------------------------------------

    @property
    def slowdown(self) -> float | None:
        """How much longer a step takes while a save is under way, as a share; None where that is not known."""
        if min(len(self._alone), len(self._beside)) < ENOUGH:
            return None
        return median(self._beside) / max(median(self._alone), 1e-9) - 1

    def goodput(self, now: float, useful: float) -> float:
        """Share of the time since the run began, up to ``now``, in which it made progress that lasted so far:
        ``useful`` seconds in this life."""
        return min((self._before.useful + useful) / max(now - self._before.began, 1e-9), 1.0)

    def of_commit(
        self, cost: Cost, healthy: bool, now: float, useful: float, at_risk: tuple[float, int]
    ) -> dict[str, float]:
        """For loggers, of a save that was just committed.

        Args:
            cost: of it.
            healthy: whether it is.
            now: seconds since 1970.
            useful: seconds of this life that were of use.
            at_risk: seconds and steps of progress that would have been lost just before the commit.
        """
        metrics = {
            "stall_seconds": cost.stall,
            "stage_seconds": cost.stage,
            "persist_seconds": cost.persist,
            "persist_gb_per_second": _speed(cost.bytes, cost.persist),
            "bytes": float(cost.bytes),
            "at_risk_seconds": at_risk[0],
            "at_risk_steps": float(at_risk[1]),
            "health": float(healthy),
            "skipped": float(self.skipped),
            "failures": float(self.failures),
            "restarts": float(self._before.restarts),
            "goodput": self.goodput(now, useful),
        }
        if self.slowdown is not None:
            metrics["step_slowdown"] = self.slowdown
        return _prefixed(metrics)

    def of_copy(self, seconds: float, sent: int, lag: float, backlog: int) -> dict[str, float]:
        """For loggers, of a checkpoint that just got into the cold tier, where ``backlog`` others are on their way."""
        return _prefixed(
            {
                "upload_seconds": seconds,
                "upload_gb_per_second": _speed(sent, seconds),
                "upload_bytes": float(sent),
                "lag_seconds": lag,
                "backlog": float(backlog),
            }
        )

    def summary(self, now: float, useful: float) -> str:
        """One line for the end of a fit, ``useful`` seconds of which were of use."""
        parts = [f"saves={len(self._stalls)}", f"bytes={human_size(self._hot_bytes)!r}"]
        if self._stalls:
            parts += [
                f"stall={sum(self._stalls):.2f}",
                f"median_stall={median(self._stalls):.3f}",
                f"median_persist={median(self._persists):.2f}",
            ]
        if self.slowdown is not None:
            parts.append(f"step_slowdown={self.slowdown:.1%}")
        if self._replicated:
            parts += [
                f"replicated={self._replicated}",
                f"sent={human_size(self._upload_bytes)!r}",
                f"most_lag={self._lag:.1f}",
            ]
        counted = {"skipped": self.skipped, "failures": self.failures, "suspect": self._suspect}
        parts += [f"{name}={count}" for name, count in counted.items() if count]
        parts += [f"restarts={self._before.restarts}", f"goodput={self.goodput(now, useful):.1%}"]
        return " ".join(parts)


def _speed(size: int, seconds: float) -> float:
    return size / seconds / 1e9 if seconds > 0 else 0.0


def _prefixed(metrics: Mapping[str, float]) -> dict[str, float]:
    return {f"{PREFIX}{name}": value for name, value in metrics.items()}


def before(record: Record, resumed_at: int, run: str = "") -> Before | None:
    """What the lives of a ``run`` in a ledger add up to, for one that goes on from step ``resumed_at``; None where
    there are none.

    What a life did beyond the earliest step that a later one began with was done again.
    """
    lives = [life for life in record.lives if not run or life.run in ("", run)]
    folded = record.folded if not record.lives or record.lives[0] in lives else Folded()
    if not lives and not folded.lives:
        return None
    useful, goes_on_at = 0.0, resumed_at
    for life in reversed(lives):
        first, last = life.reached
        lasted = min(max(goes_on_at - first, 0), last - first)
        useful += max(life.seconds - life.stalled, 0.0) * (lasted / (last - first) if last > first else 0.0)
        goes_on_at = min(goes_on_at, first)
    began = [life.began for life in lives] + ([folded.began] if folded.lives else [])
    return Before(min(began), useful + folded.useful, len(lives) + folded.lives)
