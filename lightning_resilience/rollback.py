"""Going back after a loss spike: all ranks together, to the last good checkpoint, wherever it is.

::

    the loss is off its course for long    rank 0 sees it, all agree on it
    end the save under way                 it may be of any health
    load the last good checkpoint          here, or in the cold tier; where it is damaged the one before it
    forget what came after it              all callbacks of the Trainer: suspect from now on, in both tiers
    leave out batches, save                so that a crash leads to what comes now

Parameters, optimizers and callbacks go back; the data goes on where it is.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection
from typing import NamedTuple

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_resilience.agreement import Agreement
from lightning_resilience.destination import Destination
from lightning_resilience.divergence import Rollback
from lightning_resilience.errors import (
    CheckpointCorrupt,
    CheckpointIncompatible,
    CheckpointNotFound,
    CheckpointUncommitted,
    Diverged,
    TierUnavailable,
)
from lightning_resilience.manifest import Manifest
from lightning_resilience.places import Source
from lightning_resilience.remote import RemoteTier
from lightning_resilience.saving import Saving
from lightning_resilience.session import Session
from lightning_resilience.watch import BLIND, Watch

log = logging.getLogger("lightning_resilience")


_LOOK = "Look at the data and the learning rate; checkpoints are kept."


class _Good(NamedTuple):
    """The last good checkpoint, as ranks tell each other."""

    name: str
    manifest: Manifest
    is_resumed: bool = False
    """Whether it is what the run was resumed from, which may be in another folder."""
    is_far: bool = False
    """Whether it is behind a URL alone."""


class SpikeRecovery:
    """Takes a run back when its loss has left its course for too long.

    Args:
        rule: when, and how often; None never does.
        session: of the Trainer.
        destination: where the checkpoints are.
        watch: follows the loss, and counts.
        agreement: what carries rank 0's wish to all.
        saving: of the same fit.
        loss_key: name of the loss in what ``training_step`` returns.
    """

    def __init__(
        self,
        rule: Rollback | None,
        session: Session,
        destination: Destination,
        watch: Watch,
        agreement: Agreement,
        saving: Saving,
        loss_key: str,
    ) -> None:
        self._rule = rule
        self._session = session
        self._destination = destination
        self._watch = watch
        self._agreement = agreement
        self._saving = saving
        self._loss_key = loss_key
        self.to_skip = 0
        """Batches that are still to be left out."""

    def is_wanted(self) -> bool:
        """Whether this rank wants the run to go back; rank 0 alone follows the loss."""
        if self._rule is None:
            return False
        if self._watch.unseen == BLIND:
            rank_zero_warn(
                f"rollback= has nothing to go by: no loss was seen in the last {BLIND} batches. Return it from"
                f" training_step, as a tensor or in a dict under {self._loss_key!r} (loss_key=)."
            )
        return self._watch.course.off_for >= self._rule.patience

    def skip(self) -> None:
        """Leave out what of the batches to skip can be left out now."""
        if self.to_skip:
            self.to_skip = self._session.skip_batches(self.to_skip)

    def take_back(self, epoch: int) -> None:
        """Take the run back to before the loss left its course, leave batches out, and save that.  Collective.

        Args:
            epoch: the epoch that training is in.

        Raises:
            Diverged: it was taken back as often as it may be, or there is nothing to go back to; on all ranks.
        """
        if (rule := self._rule) is None:
            return
        session, trainer = self._session, self._session.trainer
        self._agreement.close()
        self._saving.wait()
        where, times = self._judge(rule)
        source, good = self._load_last_good(where)
        self._watch.rollbacks = times + 1
        if session.ranks.rank == 0:
            log.warning(
                "event=rollback step=%d from=%s times=%d skip=%d reason=%r",
                trainer.global_step, source.name, times + 1, rule.skip_batches, where,
            )  # fmt: skip
        for forget in session.went_back:
            forget(good)
        window = trainer.accumulate_grad_batches  # gradients of half a window would be a smaller step
        self.to_skip = math.ceil(rule.skip_batches / window) * window
        self.skip()
        # Before training goes on: a crash must lead to what comes after it, with the count of times.
        self._saving.save_and_wait(f"rolled back to {source.name}", epoch, of=good)

    def _judge(self, rule: Rollback) -> tuple[str, int]:
        """What is wrong, in words, and how often the run was taken back so far; as rank 0 has it.

        Raises:
            Diverged: it may be taken back no more; on all ranks.
        """
        ranks, standings = self._session.ranks, self._destination.standings
        standings.off_since, times = ranks.broadcast((self._watch.course.off_since, self._watch.rollbacks))
        where = f"The loss has been off its course since step {standings.off_since}"
        if times >= rule.most:
            good = ranks.broadcast(standings.last_good)
            path = self._destination.folder.tier.where(good) if good is not None else ""
            which = f" The last good checkpoint is {path!r}." if path else ""
            raise Diverged(f"{where}, and the run was taken back {times} times.", hint=f"{_LOOK}{which}")
        return where, times

    def _load_last_good(self, where: str) -> tuple[Source, Manifest]:
        """Load the last good checkpoint, or where that is damaged the one before it.  Collective.

        Raises:
            Diverged: there is none, or it does not fit what is trained now; on all ranks.
        """
        useless: set[str] = set()
        while True:
            found: _Good | None = self._session.ranks.broadcast(self._find_last_good(useless))
            if found is None:
                whole = " that is whole" if useless else ""
                raise Diverged(f"{where}, and there is no checkpoint from before that{whole}.", hint=_LOOK)
            try:
                source = self._load(found)
            except CheckpointIncompatible as error:
                raise Diverged(
                    f"{where}, and the last good checkpoint, {found.name}, does not fit what is trained now:"
                    f" {error.message}",
                    hint=f"{_LOOK} Start again from {found.name}, with what was trained then.",
                ) from error
            except (CheckpointCorrupt, CheckpointNotFound, CheckpointUncommitted, TierUnavailable) as error:
                rank_zero_warn(f"The run cannot go back to {found.name}: {error}")
                useless.add(found.manifest.save_id)
                continue
            assert source.manifest is not None
            return source, source.manifest

    def _load(self, good: _Good) -> Source:
        begun, here = self._session.resumption.resumed, self._destination.folder.tier
        tier = begun.tier if good.is_resumed and begun is not None else here
        source = self._session.roll_back(tier, good.name, {good.name: good.manifest} if good.is_far else {})
        if tier is here:
            self._destination.standings.add(source.name, good.manifest)
        return source

    def _find_last_good(self, useless: Collection[str]) -> _Good | None:
        """The last good checkpoint here or in the cold tier, or else what the run was resumed from, if that is one."""
        standings = self._destination.standings
        here = {name: one for name, one in standings.committed.items() if one.save_id not in useless}
        known = {*useless} | {one.save_id for one in here.values()}
        there = {name: one for name, one in self._destination.known_cold().items() if one.save_id not in known}
        found = [(some, name) for some in (here, there) if (name := standings.last_good_of(some)) is not None]
        if not found:
            return self._resumed_from(known)
        some, name = max(found, key=lambda one: one[0][one[1]].order)
        is_far = some is there or isinstance(self._destination.folder.tier, RemoteTier)
        return _Good(name, some[name], is_far=is_far)

    def _resumed_from(self, known: Collection[str]) -> _Good | None:
        """What the run was resumed from, where it is good and not among the ``known``: loggers give each start a folder
        of its own, so it may be in another."""
        begun = self._session.resumption.resumed
        if begun is None or begun.manifest is None or begun.manifest.save_id in known:
            return None
        is_good = self._destination.standings.last_good_of({begun.name: begun.manifest}) is not None
        return _Good(begun.name, begun.manifest, is_resumed=True) if is_good and begun.tier.exists(begun.name) else None
