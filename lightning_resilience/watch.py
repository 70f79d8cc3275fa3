"""What is watched during a fit: the loss, what saves cost, and failures.

The schedule decides by it, a loss that leaves its course is noticed, and people are told in numbers.

Everything here is called from the training thread, between two batches, and waits for nothing: losses come from the
device when they come, and the ledger is written elsewhere.  What rank 0 makes of it is agreed on by all; the other
ranks only look whether their losses are finite.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_resilience.divergence import Course
from lightning_resilience.ledger import CLEAN, History, Ledger
from lightning_resilience.losses import LossStream
from lightning_resilience.manifest import HEALTHY, Manifest
from lightning_resilience.saves import Save
from lightning_resilience.schedule import Progress, Schedule
from lightning_resilience.telemetry import Cost, Telemetry, before
from lightning_resilience.useful import Useful

WATCHED = "lightning_resilience"
"""Key of it in a Trainer's checkpoint."""
LOSS_KEY = "loss"
"""Lightning's own name of the loss."""
BLIND = 100
"""Batches in a row without a loss after which there is nothing to go by."""
END_OF_TRAINING = "end of training"
"""Why a run's last checkpoint was saved."""


class Watch:
    """One fit on one rank.

    Args:
        schedule: what rank 0 decides; None where it has nothing to decide.
        rank: this rank; all but 0 decide nothing.
        loss_key: name of the loss in what ``training_step`` returns.
    """

    def __init__(self, schedule: Schedule | None, rank: int, loss_key: str) -> None:
        self._decider = schedule.decider() if schedule is not None and rank == 0 else None
        self._losses = LossStream(loss_key)
        self._loss_key = loss_key
        self._misses_losses = self._decider is not None and self._decider.wants_losses and loss_key != LOSS_KEY
        self._loss = 0.0
        self._rank = rank
        self._ledger: Ledger | None = None
        self._step = 0
        self._batch_began = 0.0
        self._safe = Progress(0, time.monotonic())  # what a crash would not lose
        self._useful = Useful()
        self.course = Course()
        self.unseen = 0
        """How many batches in a row had no loss that can be followed."""
        self.rollbacks = 0
        """How often this run was taken back."""
        self.telemetry = Telemetry(None, time.time())

    def begin(
        self,
        now: Progress,
        folder: str | os.PathLike[str] | None,
        saved: Mapping[str, Any] | None,
        *,
        ended: bool,
        run: str,
    ) -> None:
        """Training begins.

        Args:
            now: where.
            folder: of the ledger; None where there is no local one.
            saved: ``state`` from the checkpoint that is resumed, if one is.
            ended: whether that was a run's last, so that nothing failed since.
            run: id of the run.
        """
        self._safe = now
        self._useful = Useful(now.seconds)
        self._step = now.step
        if self._rank != 0:
            return
        carried = None
        if saved is not None:
            failures, seconds = saved.get("history", (0, 0.0))
            carried = History(failures + (not ended), seconds)
        self._ledger = Ledger(folder, carried)
        self._ledger.start(self._useful, now.step, run=run)
        self.telemetry = Telemetry(before(self._ledger.before, now.step, run), time.time())
        if saved is not None:
            self.course.restore(saved.get("course", {}))
            self.rollbacks = saved.get("rollbacks", 0)
        if self._decider is not None:
            if saved is not None:
                self._decider.restore(saved.get("schedule", {}))
                self._decider.see_start()
            self._decider.see_failures(self._ledger.history.failures, self._ledger.history.seconds)

    def batch_begins(self) -> None:
        """A batch is about to be trained on."""
        self._batch_began = time.perf_counter()

    def see_outputs(self, outputs: Any, saving: bool) -> None:
        """A batch was trained on, while a save was under way or not; ``outputs`` as Lightning gives them to
        ``on_train_batch_end``."""
        self.unseen = 0 if self._losses.put(outputs, self._step) else self.unseen + 1
        if self.unseen == BLIND and self._misses_losses:
            rank_zero_warn(
                f"loss_key={self._loss_key!r}: training_step has returned nothing of that name for {BLIND} batches, so"
                " the schedule goes by time alone."
            )
        self.telemetry.step(time.perf_counter() - self._batch_began, saving)

    def look(self, now: Progress) -> None:
        """Take in the losses that have arrived.  Once a batch."""
        self._see(self._losses.take(now.seconds))
        self._step = now.step
        if self._ledger is not None:
            self._ledger.beat(now.seconds, now.step)

    def look_at_all(self) -> None:
        """Take in the losses up to now.  Waits for those that are under way, as a save does anyway."""
        self._see(self._losses.take_all())

    def _see(self, losses: Sequence[tuple[float, int]]) -> None:
        if not losses:
            return
        self._loss = losses[-1][0]
        if self._rank != 0:
            return
        for loss, step in losses:
            self.course.see(loss, step)
            if self._decider is not None:
                self._decider.see_loss(loss)

    @property
    def suspicion(self) -> str:
        """Why a checkpoint of this moment would be suspect; empty where it would not."""
        return "" if math.isfinite(self._loss) else f"the loss is {self._loss}"

    def wish(self, now: Progress, last: Progress, ahead: int) -> str | None:
        """Why a save is due, or None; see ``Decider.decide``."""
        decision = self._decider.decide(now, last, ahead) if self._decider is not None else None
        return decision.reason if decision is not None else None

    def marks(self) -> Mapping[str, str]:
        """Labels for a checkpoint of this moment, and why."""
        return self._decider.marks() if self._decider is not None else {}

    def started(self) -> None:
        """A save was started with the ``marks`` of this moment."""
        if self._decider is not None:
            self._decider.see_start()

    def committed(self, save: Save, now: Progress) -> dict[str, float]:
        """A save was committed; what it cost, for loggers."""
        manifest = save.committed.result().manifest
        cost = Cost(save.stall, save.stage, save.persist, manifest.size)
        healthy = manifest.health == HEALTHY
        self.telemetry.committed(cost, healthy)
        seconds = save.seconds
        if self._decider is not None:
            self._decider.see_save(save.stall, seconds)
        self._useful.saved(manifest.order, now.seconds - seconds, save.stall)
        if self._ledger is not None:
            self._ledger.commit(now.seconds, now.step, save.stall, seconds)
        at_risk = (now.seconds - self._safe.seconds, now.step - self._safe.step)
        self._safe = Progress(save.step, now.seconds - seconds)
        return self.telemetry.of_commit(cost, healthy, time.time(), self._useful.seconds(now.seconds), at_risk)

    def skipped(self) -> None:
        """A save was not made, or not yet, because another was under way."""
        self.telemetry.skipped += 1

    def failed(self) -> None:
        """A save failed."""
        self.telemetry.failures += 1

    def replicated(self, seconds: float, sent: int, lag: float, backlog: int) -> dict[str, float]:
        """A checkpoint got into the cold tier; for loggers."""
        self.telemetry.replicated(sent, lag)
        return self.telemetry.of_copy(seconds, sent, lag, backlog)

    def went_back(self, now: Progress, good: Manifest) -> None:
        """The run was taken back to a checkpoint."""
        self._useful.back_to(good.order, now.seconds)
        self._safe = now
        self._step = now.step
        self._losses.take_all()  # they are of before
        self.course.forget_spike()
        self._loss = 0.0

    def summary(self) -> str:
        """One line for the end of the fit."""
        return self.telemetry.summary(time.time(), self._useful.seconds(time.monotonic()))

    def end(self, how: str = CLEAN) -> None:
        """Training ended; see ``ledger`` for the words."""
        if self._ledger is not None:
            self._ledger.end(time.monotonic(), self._step, how)

    def state(self) -> dict[str, Any]:
        """What to keep in the checkpoint: plain values."""
        if self._ledger is None:
            return {}
        history = self._ledger.known(time.monotonic())
        schedule = self._decider.state() if self._decider is not None else {}
        return {
            "history": [history.failures, history.seconds],
            "schedule": schedule,
            "course": self.course.state(),
            "rollbacks": self.rollbacks,
        }
