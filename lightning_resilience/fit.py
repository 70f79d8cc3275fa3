"""One fit of one callback, from ``setup`` to ``teardown``: what belongs to it, how it begins and how it ends.

::

    decisions    between two batches: go back, save and stop, or save
      recovery   going back after a loss spike
      saving     a save of this step
        news     what has become of it: to the destination, then to the callback's fields, loggers and subclasses
    destination  where it goes, and what is there
    watch        the loss, what saves cost, failures
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from lightning_resilience.agreement import Agreement
from lightning_resilience.decisions import Decisions
from lightning_resilience.destination import Destination
from lightning_resilience.errors import Diverged
from lightning_resilience.evaluations import Evaluations
from lightning_resilience.ledger import EXCEPTION, INTERRUPTED, PREEMPTED
from lightning_resilience.manifest import Manifest
from lightning_resilience.news import Audience, News
from lightning_resilience.orders import Orders
from lightning_resilience.preemption import Preempted
from lightning_resilience.rollback import SpikeRecovery
from lightning_resilience.saving import Saving
from lightning_resilience.schedule import Progress
from lightning_resilience.session import Session
from lightning_resilience.tiers import LocalTier
from lightning_resilience.watch import END_OF_TRAINING, Watch

log = logging.getLogger("lightning_resilience")

DRAIN_AFTER_EXCEPTION = 10.0
"""Seconds that a save under way and the copies on their way get, together, when training ends with an exception."""


class Fit:
    """Made in ``setup``, when there is where to save; training begins with ``begin``, and may not.

    Args:
        session: of the Trainer.
        destination: where the checkpoints go.
        orders: when and how to save.
        audience: who is told.
    """

    def __init__(self, session: Session, destination: Destination, orders: Orders, audience: Audience) -> None:
        self._session = session
        self.destination = destination
        self._orders = orders
        self._audience = audience
        agreement = Agreement(session.ranks)
        self.watch = Watch(orders.schedule.by_agreement(), session.ranks.rank, orders.loss_key)
        self.watched_before: Mapping[str, Any] | None = None
        """What was watched until the checkpoint that is resumed."""
        self.evaluations = Evaluations(session.trainer, session.ranks, destination.standings, orders)
        self._news = News(session, destination, self.watch, audience)
        self._saving = Saving(session, destination, self.watch, self.evaluations, self._news, orders)
        self._recovery = SpikeRecovery(
            orders.rollback, session, destination, self.watch, agreement, self._saving, orders.loss_key
        )
        self._decisions = Decisions(
            session, destination.folder, agreement, self.watch, self.evaluations, self._saving, self._recovery, orders
        )
        self._has_begun = False

    # -- start --------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Training begins.  Collective.

        Raises:
            Preempted: a signal came before there is anything to save; on all ranks.
        """
        session = self._session
        session.stop_before_training()
        self._decisions.begin()
        session.before_leaving.append(self._let_copies_arrive)
        session.went_back.append(self._go_on_from)
        now = self._saving.now
        self._begin_watch(now)
        self.destination.begin()
        self._say_what_it_goes_by(now)
        self._saving.begin(now)
        self._has_begun = True
        self._audience.standings()

    def _say_what_it_goes_by(self, now: Progress) -> None:
        if self._session.ranks.rank == 0:
            folder, orders = self.destination.folder, self._orders
            cold = f" remote={self.destination.cold.where()}" if self.destination.cold is not None else ""
            where = folder.tier.where()
            log.info(
                "event=fit step=%d dirpath=%s%s schedule=%r keep=%r",
                now.step,
                where,
                cold,
                orders.schedule,
                folder.keep,
            )

    def _begin_watch(self, now: Progress) -> None:
        resumed, tier = self._session.resumption.resumed, self.destination.folder.tier
        manifest = resumed.manifest if resumed is not None else None
        before = self.watched_before
        self._recovery.to_skip = before.get("to_skip", 0) if before is not None else 0
        self.watch.begin(
            now,
            tier.root if isinstance(tier, LocalTier) else None,
            before,
            ended=manifest is not None and END_OF_TRAINING in manifest.reason,
            run=self._session.engine.run,
        )

    def state(self) -> dict[str, Any]:
        """What was watched, for a checkpoint of this moment; empty where nothing was."""
        state = self.watch.state()
        return {**state, "to_skip": self._recovery.to_skip} if state else {}

    # -- training ---------------------------------------------------------------------------------------------------

    def see_outputs(self, outputs: Any) -> None:
        """A batch was trained on; it is too early to save."""
        self.watch.see_outputs(outputs, self._session.engine.busy)

    def _go_on_from(self, good: Manifest) -> None:
        """The run was taken back, by whichever callback: what this one knows of a later step is of no use."""
        self._saving.hear()  # what was under way has ended, and is left behind too
        self.watch.went_back(self._saving.go_back(), good)
        self._decisions.forget()
        self.destination.go_back(good)
        self._audience.standings()

    # -- end ----------------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Training is over: save the step that it ends at.  Collective.

        Raises:
            SaveFailed: it cannot be saved; on all ranks.
        """
        self._decisions.end()
        self.watch.end()
        if self._session.ranks.rank == 0:
            log.info("event=summary step=%d %s", self._session.trainer.global_step, self.watch.summary())

    def tell_if_nothing_was_left(self) -> None:
        """The run was finished before: what there is of it is told all the same."""
        if not self._has_begun:
            self.destination.begin()
            self._audience.standings()

    def leave(self) -> None:
        """Let what is on its way arrive.  Collective; ``close`` once all ranks have."""
        self.destination.offer()
        self._let_copies_arrive()

    def _let_copies_arrive(self) -> None:
        """Let other nodes and the cold tier have what is on its way, as long as there is time."""
        self.destination.drain(self._orders.timeout)
        self._news.hear_of_copies()

    def abandon(self, exception: BaseException, *, save: bool) -> None:
        """Let the save under way finish and what is on its way arrive, within seconds and without a word to the other
        ranks, which may be anywhere.

        Args:
            exception: what ended training.
            save: whether to save the moment, where there are no other ranks.
        """
        session = self._session
        try:
            is_alone = session.ranks.world_size == 1 and self._has_begun
            if save and is_alone and not isinstance(exception, (Preempted, Diverged)):
                session.engine.drain(DRAIN_AFTER_EXCEPTION)
                reason = f"{type(exception).__name__}: {exception}"[:200]
                self._saving.save(reason, session.trainer.current_epoch, settled=False)
        except Exception as error:  # the exception that ends training is the one to be seen
            log.warning("event=save step=%d outcome=failed error=%r", session.trainer.global_step, error)
        finally:
            self.watch.end(_how_it_ended(exception))
            deadline = _deadline_after_exception(session)
            try:
                self.destination.abandon(deadline, has_begun=self._has_begun)
            finally:
                session.abandon(max(deadline - time.monotonic(), 0.0), exception)


def abandon(session: Session, exception: BaseException) -> None:
    """The same of a callback that saves nothing, as in a validation."""
    session.abandon(max(_deadline_after_exception(session) - time.monotonic(), 0.0), exception)


def _deadline_after_exception(session: Session) -> float:
    """Second of the monotonic clock until which background work may go on after an exception of now."""
    return min(time.monotonic() + DRAIN_AFTER_EXCEPTION, session.preemption.deadline())


def _how_it_ended(exception: BaseException) -> str:
    """In the ledger's words: only what nobody meant is a failure."""
    if isinstance(exception, KeyboardInterrupt):
        return INTERRUPTED
    return PREEMPTED if isinstance(exception, SystemExit) else EXCEPTION
