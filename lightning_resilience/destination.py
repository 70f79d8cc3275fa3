"""Where the checkpoints of one callback go: a folder, the cold tier behind it, and the folders of other nodes.

::

    a save is committed  ──>  standings: what is there, which is the best    ──>  rule: what may go
                         ──>  replicator: on its way to the cold tier
                         ──>  peers: on its way to other nodes

It knows what has been committed there; it does not save.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Collection, Mapping
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_resilience.arguments import check_apart, identity
from lightning_resilience.doorway import run_folder
from lightning_resilience.errors import SetupError
from lightning_resilience.manifest import Manifest, newest_first
from lightning_resilience.peers import Peers
from lightning_resilience.ranks import Ranks, raise_first
from lightning_resilience.remote import RemoteTier
from lightning_resilience.replication import Replicated, Replicator
from lightning_resilience.retention import Keep, Ranking
from lightning_resilience.saves import Committed, manifests_in
from lightning_resilience.session import Session
from lightning_resilience.standings import Standings
from lightning_resilience.tiers import LocalTier, local_path
from lightning_resilience.urls import is_url

log = logging.getLogger("lightning_resilience")


def tier_at(dirpath: str, storage_options: dict[str, Any] | None) -> LocalTier | RemoteTier:
    """Where a callback saves to, which is a URL or a folder."""
    return RemoteTier(dirpath, storage_options) if is_url(dirpath) else LocalTier(dirpath)


def agreed_folder(given: str | None, callback: ModelCheckpoint, trainer: Trainer, ranks: Ranks) -> str:
    """The folder: rank 0's, so that loggers that number their runs do not split it; or each rank's own if that was
    asked for, by a variable in what was ``given``."""
    if given is not None and is_url(given):
        return given
    if given is not None and "$" in given:
        raise_first(ranks.gathered(lambda: _check_variables(given)))
        return os.path.abspath(os.path.expandvars(given))
    return ranks.broadcast(os.path.abspath(local_path(run_folder(callback, trainer))))


def _check_variables(path: str) -> None:
    """Raise SetupError where a variable in a path is not set here, unless there is a folder of that very name."""
    unset = [name for name in re.findall(r"\$\{?(\w+)", path) if name not in os.environ]
    if unset and not os.path.isdir(os.path.expandvars(path)):
        raise SetupError(
            f"dirpath={path!r}: the environment variable {unset[0]} is not set.",
            hint="Set it on every node, or give another dirpath=.",
        )


def sibling_folders(tier: LocalTier | RemoteTier) -> list[str]:
    """Folders of earlier runs where the logger numbers them (``…/version_3/checkpoints``): "last" is in one of
    those."""
    if not isinstance(tier, LocalTier) or not tier.root.parent.name.startswith("version_"):
        return []
    root = tier.root
    return sorted(str(path) for path in root.parent.parent.glob(f"version_*/{root.name}") if path != root)


class Destination:
    """Where one callback's checkpoints go during a fit, and what is known to be there.

    Opening it is collective.

    Args:
        session: of the Trainer.
        tier: the folder, or what is saved straight to.
        cold: the cold tier behind it.
        keep: what is retained here.
        remote_keep: what the cold tier retains.
        ranking: what the best are ranked by.
        top_k: how many of the best are wanted.
        link: name of the link to the newest, if there is to be one.
        copies: on how many other nodes there is to be a second copy.

    Raises:
        SetupError: the places are not apart from each other and from other callbacks'.
        TierUnavailable, TierDenied: one of them cannot be written.
    """

    def __init__(
        self,
        session: Session,
        tier: LocalTier | RemoteTier,
        cold: RemoteTier | None,
        *,
        keep: Keep,
        remote_keep: Keep,
        ranking: Ranking | None,
        top_k: int,
        link: str | None,
        copies: int,
    ) -> None:
        _check_places(session, tier, cold)
        self._session = session
        self.folder = session.folder(
            tier, keep=keep, ranking=ranking, link=link, remote_keep=remote_keep if cold is not None else None
        )
        self.standings = Standings(keep, ranking, top_k)
        self.standings.committed = manifests_in(self.folder, session.ranks)
        session.engine.count_from(self.standings.committed.values())
        self.cold = cold
        self.replicator: Replicator | None = None
        if cold is not None:
            self.replicator = self._begin_replicating(cold, remote_keep, ranking)
        session.engine.protect(self.folder, self._must_stay)
        try:
            self._peers = self._find_peers(tier, copies) if copies and isinstance(tier, LocalTier) else None
        except BaseException:
            if self.replicator is not None:
                self.replicator.abandon()
            raise

    def _find_peers(self, tier: LocalTier, copies: int) -> Peers | None:
        if len(self.folder.leaders) > 1:
            return Peers(self._session.ranks, tier, self.folder.sharing, copies)
        rank_zero_warn(f"peers={copies} copies nothing: all ranks share {tier.where()!r}.")
        return None

    def _begin_replicating(self, cold: RemoteTier, keep: Keep, ranking: Ranking | None) -> Replicator:
        """Go on with what a killed run left on its way, and make sure now that the cold tier can be written."""
        engine = self._session.engine
        replicator = Replicator(
            self._session.ranks,
            self.folder,
            cold,
            keep,
            ranking,
            run=lambda: engine.run,
            tolerant=bool(self.standings.committed),
            last_good=self.standings.last_good_of,
        )
        engine.count_from(replicator.known_cold().values())
        return replicator

    # -- what stays ---------------------------------------------------------------------------------------------------

    def _must_stay(self) -> set[str]:
        """Names that stay in the folder, whatever its rule says; asked for until the last background work has ended."""
        on_their_way = self.replicator.protected() if self.replicator is not None else set()
        return {*on_their_way, *filter(None, [self.standings.last_good])}

    def _in_use(self) -> set[str]:
        """Names that stay in the cold tier, whatever its rule says."""
        return {*self._session.engine.in_use, *filter(None, [self.standings.last_good])}

    # -- what happens -------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Training begins."""
        begun, engine = self._session.resumption.resumed, self._session.engine
        self.standings.begin(engine.run, begun.manifest if begun is not None else None, engine.sequence)
        if begun is None and self._session.ranks.rank == 0:
            self._warn_of_others()
        self.offer()

    def _warn_of_others(self) -> None:
        """A run that starts where others have been: their checkpoints are not its own to remove."""
        own, others = self.standings.own, self.standings.committed
        if others := {name: one for name, one in others.items() if name not in own}:
            newest = others[newest_first(others)[0]]
            log.warning(
                "event=others dirpath=%s checkpoints=%d newest_step=%d note=%r",
                self.folder.tier.where(),
                len(others),
                newest.step,
                "they are of other runs: they stay, and what this run keeps is counted without them; pass"
                " ckpt_path='last' to fit to go on with that run, or give this one a dirpath of its own",
            )

    def offer(self) -> None:
        """Let the cold tier have what is committed."""
        if self.replicator is not None:
            self.replicator.offer(self.standings.committed, self._in_use())

    def add(self, checkpoint: Committed) -> None:
        """A save was committed: send it on, and forget what the rule gives up for it."""
        self.standings.add(checkpoint.name, checkpoint.manifest)
        self.offer()
        self.standings.give_up(self._session.engine.must_stay(self.folder))
        if self._peers is not None:
            self._peers.offer(checkpoint.name, checkpoint.manifest)

    def arrived(self) -> list[Replicated]:
        """The checkpoints that the cold tier has got since the last call."""
        return self.replicator.poll() if self.replicator is not None else []

    def backlog(self) -> int:
        """How many checkpoints are on their way to the cold tier."""
        return len(self.replicator.pending()) if self.replicator is not None else 0

    def known_cold(self) -> Mapping[str, Manifest]:
        """The checkpoints that the cold tier has, by name."""
        return self.replicator.known_cold() if self.replicator is not None else {}

    def go_back(self, good: Manifest) -> None:
        """The run goes on from ``good``: what was saved since is called suspect, here and in the cold tier."""
        left = self.standings.go_back(good)
        self._session.leave_behind(self.folder, left, self.standings.newest)
        if self.replicator is not None:
            self.replicator.leave_behind(self.standings.left_behind(self.replicator.known_cold(), good).values())
            self.offer()

    # -- end ----------------------------------------------------------------------------------------------------------

    def drain(self, seconds: float) -> None:
        """Let other nodes and the cold tier have what is on its way, for so long at most, and as long as a signal
        leaves time.  Collective."""
        leave_by = self._session.preemption.leave_by
        if self._peers is not None:
            self._peers.drain(max(min(seconds, leave_by() - time.monotonic()), 0.0))
        if self.replicator is not None:
            self.replicator.close(seconds, leave_by)

    def close(self) -> None:
        """Take nothing from other nodes any more; all of them have drained."""
        if self._peers is not None:
            self._peers.close()

    def abandon(self, deadline: float, *, has_begun: bool) -> None:
        """After an exception: the same as ``drain`` without the other ranks, the save under way included.

        Args:
            deadline: second of the monotonic clock at which to give up.
            has_begun: whether training had; otherwise nothing is on its way.
        """
        if self._peers is not None:
            self._peers.drain(max(deadline - time.monotonic(), 0.0) / 2)
            self._peers.close()
        if self.replicator is not None:
            self._replicate_until(deadline, self.replicator, has_begun)

    def _replicate_until(self, deadline: float, replicator: Replicator, has_begun: bool) -> None:
        """Let the cold tier have what is on its way; no exception comes from here."""
        try:
            if has_begun:
                self._session.engine.drain(max(deadline - time.monotonic(), 0.0))
                for save in self._session.finished(self.folder):
                    if save.committed.exception() is None:
                        self.standings.add(save.committed.result().name, save.committed.result().manifest)
                self.offer()
                replicator.drain(max(deadline - time.monotonic(), 0.0))
        except Exception as error:
            log.warning("event=drain tier=cold outcome=failed error=%r", error)
        finally:
            replicator.abandon()


def _check_places(session: Session, tier: LocalTier | RemoteTier, cold: RemoteTier | None) -> None:
    """Raise SetupError, on all ranks, where the places are not apart from each other and from other callbacks'."""
    taken = {identity(other) for other in _tiers_of(session) if other is not None}
    for argument, one in (("dirpath", tier), ("remote", cold)):
        if one is not None and identity(one) in taken:
            raise SetupError(
                f"Two checkpoint callbacks save to {one.where()!r}, where each would remove what the other keeps.",
                hint=f"Give them different {argument}=.",
            )
    if cold is not None and isinstance(tier, LocalTier):
        raise_first(session.ranks.gathered(lambda: check_apart(tier.root, cold.objects)))


def _tiers_of(session: Session) -> Collection[LocalTier | RemoteTier | None]:
    return [tier for place in session.lookup.places.values() for tier in (place.tier, place.cold)]
