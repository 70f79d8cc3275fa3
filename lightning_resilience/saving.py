"""The saves of one callback: each step boundary once, without waiting or with, until too many have failed."""

from __future__ import annotations

import math
import time

from lightning_resilience.destination import Destination
from lightning_resilience.errors import SaveFailed
from lightning_resilience.evaluations import Evaluations
from lightning_resilience.manifest import LAST_GOOD, Manifest
from lightning_resilience.news import News
from lightning_resilience.orders import Orders
from lightning_resilience.saves import OVERDUE
from lightning_resilience.schedule import Progress
from lightning_resilience.session import Session
from lightning_resilience.trainer_state import position_of, step_of
from lightning_resilience.urls import shown
from lightning_resilience.watch import Watch


class Saving:
    """Saves of one fit, at the step that training is at.

    Args:
        session: of the Trainer.
        destination: where they go.
        watch: what makes a checkpoint suspect, or a milestone.
        evaluations: gives the numbers for the manifest.
        news: hears how they ended.
        orders: how to save.
    """

    def __init__(
        self,
        session: Session,
        destination: Destination,
        watch: Watch,
        evaluations: Evaluations,
        news: News,
        orders: Orders,
    ) -> None:
        self._session = session
        self._destination = destination
        self._watch = watch
        self._evaluations = evaluations
        self._news = news
        self._orders = orders
        self._saved_at: tuple[int, int] | None = None
        self.last = Progress(0, 0.0)
        """Where training was when the last save was started, or where it began."""

    @property
    def now(self) -> Progress:
        """Where training is."""
        return Progress(step_of(self._session.trainer), time.monotonic())

    @property
    def _is_saved(self) -> bool:
        """Whether this step boundary is, or is being saved, as far as this rank has heard."""
        return self._saved_at == position_of(self._session.trainer)

    def begin(self, now: Progress) -> None:
        """Training begins, at a step that is saved if it is resumed."""
        self.last = now
        if self._session.resumption.resumed is not None:
            self._saved_at = position_of(self._session.trainer)

    def go_back(self) -> Progress:
        """The run was taken back: where it is now, which is not saved."""
        self._saved_at = None
        self.last = self.now
        return self.last

    def hear(self) -> None:
        """Take note of the saves and copies that ended since the last time."""
        if self._news.hear(self.now):
            self._saved_at = None

    def prepare(self) -> None:
        """Make ready for the first save; see ``Session.prepare``.  Collective."""
        self._session.prepare(self._orders.weights_only)

    def save(
        self, reason: str, epoch: int, *, settled: bool = True, of: Manifest | None = None, overlap: bool = False
    ) -> bool:
        """Start a save of this step, unless it is saved already.  Collective.

        Args:
            reason: why.
            epoch: the epoch that the last batch belonged to.
            settled: whether Lightning is between two batches, rather than anywhere.
            of: the checkpoint that the run was just taken back to, if it was.
            overlap: whether a forward and a backward pass follow, and copying may go on meanwhile.

        Returns:
            Whether there is one; on all ranks alike.  There is none where another is under way.

        Raises:
            SaveFailed: too many in a row have failed; on all ranks.
        """
        session, watch, standings = self._session, self._watch, self._destination.standings
        watch.look_at_all()
        suspicion, off_since = watch.suspicion, watch.course.doubtful_since
        # Ranks hear of failures at different moments, so they may differ in what they take for saved.
        unsaved, suspect, off_since = session.ranks.any_max(
            not self._is_saved, bool(suspicion), -1 if off_since is None else off_since
        )
        if not unsaved:
            session.turns.leave(self._destination.folder)
            return True
        self._stop_after_failures()
        standings.off_since = off_since if off_since >= 0 else None
        marks = watch.marks() if not suspect else {}
        orders = self._orders
        facts = session.capture.facts(
            "; ".join([reason, *(f"{mark}: {why}" for mark, why in marks.items())]),
            epoch,
            self._evaluations.metrics() if of is None else of.metrics,
            weights_only=orders.weights_only,
            labels=(*([LAST_GOOD] if of is not None else []), *marks),
            suspicion=(suspicion or "the loss of another rank is not finite") if suspect else "",
            off_since=standings.off_since,
        )
        save = session.save(
            self._destination.folder,
            orders.name(epoch),
            facts,
            settled=settled,
            weights_only=orders.weights_only,
            replace=orders.replace,
            overlap=overlap,
        )
        if save is None:
            session.turns.refused(self._destination.folder)
            watch.skipped()
            return False
        session.turns.began(save)
        watch.started()
        self._saved_at = position_of(session.trainer)
        self.last = self.now
        return True

    def save_and_wait(self, reason: str, epoch: int, deadline: float = math.inf, *, of: Manifest | None = None) -> None:
        """Save this step, unless it is saved, and wait until it is committed; not beyond ``deadline``, a second of the
        monotonic clock.  Collective.

        Raises:
            SaveFailed: it is not, or too many in a row have failed; on all ranks.
        """
        self.wait(deadline)
        while not self._is_saved and self.now.step > 0:
            self.save(reason, epoch, of=of)
            self.wait(deadline)

    def wait(self, deadline: float = math.inf) -> None:
        """Until the save under way has ended on all ranks, but not beyond ``deadline``.  Collective.

        Raises:
            SaveFailed: it has not, on some rank; on all of them.
        """
        begin = time.monotonic()
        done = self._session.engine.drain(max(min(self._orders.timeout + OVERDUE, deadline - begin), 0.0))
        self.hear()
        hangs, failed = self._session.ranks.any_max(not done, self._saved_at is None)
        if hangs:
            raise SaveFailed(
                f"The storage behind {shown(self._destination.folder.tier.where())!r} does not answer in time: a save"
                f" is still under way after {time.monotonic() - begin:.0f} s.",
                hint="Earlier checkpoints are untouched: start again with ckpt_path='last' once it does.",
            )
        if failed:
            self._saved_at = None

    def _stop_after_failures(self) -> None:
        """Raise on all ranks alike once too many saves in a row have failed."""
        failures = self._session.ranks.any_max(self._session.engine.failures(self._destination.folder))[0]
        if failures >= self._orders.most_failures:
            raise SaveFailed(
                f"{failures} saves in a row have failed; the last cause: {self._news.last_error}",
                hint="Earlier checkpoints are untouched: mend the storage, then start again with ckpt_path='last'.",
            )
