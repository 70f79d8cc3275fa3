"""What rank 0 watches during a fit: the loss, what saves cost, and failures; the schedule decides by it.

Everything here is called from the training thread, between two batches, and waits for nothing: losses come from the
device when they come, and the ledger is written elsewhere.  On the other ranks nothing is watched, because what rank 0
wishes is agreed on by all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from lightning_resilience.engine import Save
from lightning_resilience.ledger import CLEAN, History, Ledger
from lightning_resilience.losses import LossStream
from lightning_resilience.schedule import Progress, Schedule

END_OF_TRAINING = "end of training"
"""Why a run's last checkpoint was saved."""


class Watch:
    """One fit on one rank.

    Args:
        schedule: what rank 0 decides; None where it has nothing to decide.
        rank: this rank; all but 0 watch nothing.
        loss_key: name of the loss in what ``training_step`` returns.
    """

    def __init__(self, schedule: Schedule | None, rank: int, loss_key: str) -> None:
        self._decider = schedule.decider() if schedule is not None and rank == 0 else None
        self._losses = LossStream(loss_key) if self._decider is not None and self._decider.wants_losses else None
        self._rank = rank
        self._ledger: Ledger | None = None
        self._step = 0

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
        if self._rank != 0:
            return
        carried = None
        if saved is not None:
            failures, seconds = saved.get("history", (0, 0.0))
            carried = History(failures + (not ended), seconds)
        self._step = now.step
        self._ledger = Ledger(folder, carried)
        self._ledger.start(now.seconds, now.step, run=run)
        if self._decider is not None:
            if saved is not None:
                self._decider.restore(saved.get("schedule", {}))
                self._decider.see_start()
            self._decider.see_failures(self._ledger.history.failures, self._ledger.history.seconds)

    def see_outputs(self, outputs: Any) -> None:
        """A batch was trained on; ``outputs`` as Lightning gives them to ``on_train_batch_end``."""
        if self._losses is not None:
            self._losses.put(outputs)

    def wish(self, now: Progress, last: Progress, ahead: int) -> str | None:
        """Why a save is due, or None; see ``Decider.decide``."""
        if self._ledger is not None:
            self._step = now.step
            self._ledger.beat(now.seconds, now.step)
        if self._decider is None:
            return None
        if self._losses is not None:
            for loss in self._losses.take(now.seconds):
                self._decider.see_loss(loss)
        decision = self._decider.decide(now, last, ahead)
        return decision.reason if decision is not None else None

    def marks(self) -> Mapping[str, str]:
        """Labels for a checkpoint of this moment, and why.  Waits for the losses up to now, as a save does anyway."""
        if self._decider is None:
            return {}
        if self._losses is not None:
            for loss in self._losses.take_all():
                self._decider.see_loss(loss)
        return self._decider.marks()

    def started(self) -> None:
        """A save was started with the ``marks`` of this moment."""
        if self._decider is not None:
            self._decider.see_start()

    def committed(self, save: Save, now: Progress) -> None:
        """A save was committed."""
        seconds = save.stall + save.persist
        if self._decider is not None:
            self._decider.see_save(save.stall, seconds)
        if self._ledger is not None:
            self._ledger.commit(now.seconds, now.step, save.stall, seconds)

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
        return {"history": [history.failures, history.seconds], "schedule": schedule}
