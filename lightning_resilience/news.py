"""What has become of saves and copies: heard of between two batches, in the training thread, and passed on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_resilience.destination import Destination
from lightning_resilience.manifest import HEALTHY
from lightning_resilience.replication import Replicated
from lightning_resilience.saves import Committed, Save, log_save
from lightning_resilience.schedule import Progress
from lightning_resilience.session import Session
from lightning_resilience.watch import Watch

log = logging.getLogger("lightning_resilience")


@dataclass(frozen=True)
class Audience:
    """Whom to tell: that the ``standings`` have changed, what saves and copies cost (``costs``), which checkpoint was
    ``committed``, and which the cold tier has got (``replicated``)."""

    standings: Callable[[], None]
    costs: Callable[[Mapping[str, float]], None]
    committed: Callable[[Committed], None]
    replicated: Callable[[Replicated], None]


class News:
    """Hears of one callback's saves and copies.

    Args:
        session: of the Trainer.
        destination: where they go.
        watch: what keeps count of them.
        audience: who is told.
    """

    def __init__(self, session: Session, destination: Destination, watch: Watch, audience: Audience) -> None:
        self._session = session
        self._destination = destination
        self._watch = watch
        self._audience = audience
        self._last_save: Save | None = None
        self._overdue: Save | None = None
        self.last_error = "see the log of the rank that failed"
        """Why the last save failed that did."""

    def hear(self, now: Progress) -> bool:
        """Take note of the saves and copies that ended since the last time; whether a save failed."""
        self._look_for_a_hang()
        has_failed = False
        for save in self._session.finished(self._destination.folder):
            error = save.committed.exception()
            if error is None:
                self._take_committed(save, now)
            else:
                has_failed = True
                self.last_error = str(error)
                self._watch.failed()
                rank_zero_warn(f"{error} Earlier checkpoints are untouched.")
        self.hear_of_copies()
        return has_failed

    def _look_for_a_hang(self) -> None:
        late = self._session.engine.overdue
        if late is not None and late is not self._overdue:
            self._overdue = late
            log.warning("event=hang step=%d reason='the storage does not answer; no save is possible'", late.step)

    def _take_committed(self, save: Save, now: Progress) -> None:
        checkpoint = save.committed.result()
        if self._session.ranks.rank == 0:
            log_save(save)
        self._audience.costs(self._watch.committed(save, now))
        self._destination.add(checkpoint)
        if self._session.ranks.rank == 0 and checkpoint.manifest.health != HEALTHY:
            log.warning(
                "event=health step=%d name=%s health=%s reason=%r note='it is kept, and not resumed from'",
                checkpoint.manifest.step,
                checkpoint.name,
                checkpoint.manifest.health,
                checkpoint.manifest.extra.get("suspicion", ""),
            )
        self._audience.standings()
        self._audience.committed(checkpoint)
        self._session.engine.tidy(save)  # only now: until it is told of, what users know of must stay
        self._last_save = save

    def hear_of_copies(self) -> None:
        """Take note of the checkpoints that the cold tier has got since the last time."""
        copies = self._destination.arrived()
        for copy in copies:
            backlog = self._destination.backlog()
            self._audience.costs(self._watch.replicated(copy.seconds, copy.bytes, copy.lag, backlog))
            self._audience.replicated(copy)
        if copies and self._last_save is not None:
            self._session.engine.tidy(self._last_save)  # what was kept only because it was on its way may go
