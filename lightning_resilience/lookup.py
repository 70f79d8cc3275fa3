"""What ``ckpt_path`` means, and which checkpoint it leads to.

Callbacks name the *places* that they save to.  ``"last"`` is searched for in those of them that were asked for it, and
in the folders of runs beside theirs; a path or a URL may be of such a place, or one of its own.  All ranks come to the
same checkpoint, or to the same error.
"""

from __future__ import annotations

import logging
import math
import os
import tempfile
import uuid
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_resilience import store
from lightning_resilience.arguments import identity
from lightning_resilience.attempts import Attempts, crash_loop, tried_in_vain
from lightning_resilience.doorway import Doorway
from lightning_resilience.engine import Engine
from lightning_resilience.errors import (
    CheckpointCorrupt,
    CheckpointIncompatible,
    CheckpointNotFound,
    CheckpointUncommitted,
)
from lightning_resilience.heal import make_whole
from lightning_resilience.manifest import MANIFEST, Manifest
from lightning_resilience.memory import MemoryTier
from lightning_resilience.places import Needs, Place, Source
from lightning_resilience.ranks import Ranks, attempt, raise_first
from lightning_resilience.remote import RemoteTier
from lightning_resilience.resume import Search, find_last, open_explicit, open_with_copies
from lightning_resilience.saves import Folder
from lightning_resilience.scratch import Scratch
from lightning_resilience.tiers import LocalTier, local_path
from lightning_resilience.transfer import Stat
from lightning_resilience.urls import is_url, shown

log = logging.getLogger("lightning_resilience")


class Lookup:
    """Finds what one Trainer is to load.  All but the attributes and what ends a start is collective.

    Args:
        ranks: the ranks that load together.
        doorway: the way into Lightning.
        engine: saves of the run.
        memory: what killed processes of this run left on this node.
        folders: those that are open for saving, by path or URL, as they come.
        needs: see ``heal.make_whole``.
    """

    def __init__(
        self,
        ranks: Ranks,
        doorway: Doorway,
        engine: Engine,
        memory: MemoryTier,
        folders: Mapping[str, Folder],
        needs: Needs,
    ) -> None:
        self._ranks = ranks
        self._doorway = doorway
        self._engine = engine
        self._memory = memory
        self._folders = folders
        self._needs = needs
        self.places: dict[str, Place] = {}
        """Where checkpoints are read from, by folder and by the URL behind it: what callbacks have, and what a path, a
        URL or the search for the last one led to besides."""
        self.resume_last: list[tuple[Place, list[str]]] = []
        """Where to look for ``ckpt_path="last"``, filled by callbacks that were asked for it: a place, and folders."""
        self.storage_options: list[dict[str, Any]] = []
        """What callbacks were given for their URLs."""
        self.starts_over = True
        """Whether a run starts over where none of its checkpoints can be restored."""
        self.max_attempts = math.inf
        """How many starts from one checkpoint may crash."""
        self._searched: list[Place] = []
        self._chosen: Source | str | None = None
        self._skipped = ""
        self._attempts: Attempts | None = None
        self._reached = 0  # the last step that there is a checkpoint of which starts crashed from
        self._scratches: dict[LocalTier, tuple[Scratch, bool]] = {}
        """Folders for what is fetched, and whether this rank is the one to remove each."""

    # -- places -------------------------------------------------------------------------------------------------------

    def place(self, tier: LocalTier | RemoteTier, cold: RemoteTier | None = None, *, find_out: bool = False) -> Place:
        """Where checkpoints of a tier are read from.  Collective.

        Args:
            tier: what is saved to; what has no local folder gets one for as long as this session lasts.
            cold: what is behind it.
            find_out: whether to find out which ranks share a folder that is not open, where they can write it;
                otherwise all are taken to.
        """
        cold = tier if isinstance(tier, RemoteTier) else cold
        if isinstance(tier, RemoteTier):
            place = Place(*self._scratch(), cold, self._memory, passing=True)
        else:
            place = Place(tier, self._sharing(tier, find_out), cold, self._memory)
        self.places[tier.where()] = place
        if cold is not None:
            self.places[cold.where()] = place
        return place

    def _sharing(self, tier: LocalTier, find_out: bool) -> tuple[int, ...]:
        """The ranks that share a folder; see ``place``."""
        if (folder := self._folders.get(tier.where())) is not None:
            return folder.sharing
        if find_out and self._ranks.world_size > 1:
            sharing = attempt(lambda: self._ranks.sharing(tier))  # fails on all ranks or on none
            if isinstance(sharing, tuple):
                return sharing
        return tuple(range(self._ranks.world_size))

    def remember(self, tier: LocalTier | RemoteTier) -> None:
        """Read what a killed process of the run whose folder is ``tier`` left in memory, and let the first such run be
        the one that this process leaves it to."""
        self._engine.belong_to(identity(tier))
        self._memory.look_for(identity(tier))

    def _scratch(self) -> tuple[LocalTier, tuple[int, ...]]:
        """A folder on this machine for what is fetched, and the ranks that share it."""
        token = self._ranks.broadcast(uuid.uuid4().hex[:12])
        opened: list[Scratch] = []
        raise_first(self._ranks.gathered(lambda: opened.append(Scratch(Path(tempfile.gettempdir()), token))))
        tier = LocalTier(opened[0].path)
        sharing = self._ranks.sharing(tier)
        self._scratches[tier] = opened[0], self._ranks.rank == sharing[0]
        return tier, sharing

    # -- which checkpoint ---------------------------------------------------------------------------------------------

    def choose(self, checkpoint_path: Any, *, reading_checks: bool = False) -> Source | str | None:
        """What to load: a checkpoint of ours, a path for stock Lightning to load, or nothing.

        Args:
            checkpoint_path: what the user gave.
            reading_checks: whether the last one may be damaged, as will be found out while it is read: where whatever
                is loaded in its stead replaces all that was read.
        """
        self._chosen = self._choose(checkpoint_path, reading_checks)
        return self._chosen

    def _choose(self, checkpoint_path: Any, reading_checks: bool) -> Source | str | None:
        is_last = self._ranks.any_max(bool(self.resume_last))[0]
        found = self._last(reading_checks) if is_last else None
        if found is not None:
            return found
        path = self._doorway.last_of_stock_callbacks() if is_last else checkpoint_path
        text: str | None = self._ranks.broadcast(None if path is None else os.fspath(path))
        if text is not None:
            return self._given(text)
        if is_last and not self._doorway.fitting:
            raise CheckpointNotFound(
                "ckpt_path='last' was given, and there is no checkpoint.", hint="Check dirpath=, or give a path."
            )
        return None

    def _last(self, reading_checks: bool) -> Source | str | None:
        """The newest checkpoint in the places to search, of ours or else of stock Lightning; None for a run that
        starts."""
        self._searched = self._places_to_search()
        # Where there may be nothing to load in its stead, the model must not have been touched.
        search = self._newest(reading_checks=reading_checks and not self.starts_over)
        if search.source is not None:
            return search.source
        if not search.skipped:
            return self._newest_of_stock()
        none = _none_to_resume(search, self._doorway.fitting)
        if not self.starts_over:
            raise none
        rank_zero_warn(f"{none.message} Starting over from step 0, because on_unrestorable='fresh'.")
        return None

    def _newest_of_stock(self) -> Source | str | None:
        tiers = [place.tier for place in self._searched]
        stock = self._ranks.told(lambda: store.newest_stock(tiers[0]) if tiers else None)
        if isinstance(stock, BaseException):
            raise stock
        if stock is not None:
            rank_zero_warn(f"There is no checkpoint of ResilientCheckpoint yet; resuming {stock}, of stock Lightning.")
            return self._given(str(stock))
        if self._ranks.rank == 0:
            searched = [
                tier.where() for place in self._searched for tier in (place.tier, place.cold) if tier is not None
            ]
            log.info("event=start step=0 reason='no checkpoint yet in %s'", ", ".join(searched))
        return None

    def _given(self, text: str) -> Source | str:
        """What a path or URL leads to; see ``choose``."""
        if is_url(text):
            return self._from_url(text)
        path = local_path(text).absolute()
        is_file, is_ours = self._ranks.broadcast((path.is_file(), (path.parent / MANIFEST).is_file()))
        if is_file and is_ours:
            raise CheckpointNotFound(f"{text!r} is a file of a checkpoint.", hint=f"Give {str(path.parent)!r}.")
        if is_file:
            return str(path)
        # Of a folder that is called differently on every node, each rank opens its own.
        known = {where: folder.tier for where, folder in self._folders.items()}
        known |= {where: place.tier for where, place in self.places.items() if where == place.tier.where()}
        roots, parent = list(known), str(path.parent)
        number = self._ranks.broadcast(roots.index(parent) if parent in roots else None)
        if number is not None:
            tier = known[roots[number]]
            assert isinstance(tier, LocalTier)
            return self._from_folder(tier, path.name)
        return open_explicit(self._ranks, path, needs=self._needs)

    def _from_folder(self, tier: LocalTier, name: str) -> Source:
        """A checkpoint of a folder that is open, or of the cold tier behind it."""
        place = self.places.get(tier.where()) or self.place(tier)
        try:
            return open_explicit(self._ranks, tier.path(name), place, self._needs)
        except (CheckpointNotFound, CheckpointUncommitted, CheckpointCorrupt) as error:
            if place.cold is None and isinstance(error, CheckpointCorrupt):
                raise
            found: Source | str | None = open_with_copies(self._ranks, place, name, self._needs)
            if found is None and place.cold is not None:
                found = self._from_url(place.cold.where(name))
            if isinstance(found, Source):
                return found
            raise

    def _from_url(self, url: str) -> Source | str:
        """The checkpoint at a URL; the URL itself where stock Lightning can load what is there."""
        root, _, name = url.rstrip("/").rpartition("/")
        place = self.places.get(root)
        if place is None:
            options = next(iter(self.storage_options), None)
            place = self.place(RemoteTier(root, options))
        cold = place.cold
        assert cold is not None
        found = self._ranks.told(lambda: store.read_manifest(cold, name))
        if isinstance(found, Manifest):
            tier = place.tier
            here = attempt(lambda: store.read_manifest(tier, name))
            is_another = isinstance(here, Manifest) and not here.is_same_save(found)
            if self._ranks.any_max(is_another)[0]:
                place = Place(*self._scratch(), cold, self._memory, passing=True)
            copies = {name: found}
            return make_whole(self._ranks, place, name, save=found.save_id, copies=copies, needs=self._needs)
        if isinstance(found, (CheckpointNotFound, CheckpointUncommitted)):
            stat = self._ranks.told(lambda: cold.patience(lambda: cold.objects.stat(name)))
            if isinstance(stat, Stat):
                return url
            hint = self._ranks.told(lambda: store.available(cold))
            raise type(found)(found.message, hint=hint if isinstance(hint, str) else "")
        assert isinstance(found, BaseException)
        raise found

    def _places_to_search(self) -> list[Place]:
        others: list[str] = self._ranks.broadcast([path for _, paths in self.resume_last for path in paths])
        places = [place for place, _ in self.resume_last]
        self.resume_last = []
        known = {place.tier.root for place in places}
        for path in others:
            self._memory.look_for(identity(LocalTier(path)))
        return places + [self.place(LocalTier(path)) for path in others if Path(path) not in known]

    def choose_checked(self) -> Source | None:
        """The newest checkpoint, every byte of it checked, now that what was chosen turned out to be damaged; None
        where that is gone, and there is no other.

        Raises:
            CheckpointCorrupt: there are some, and none is whole.
        """
        self.forgive()  # one start is one attempt
        search = self._newest(reading_checks=False)
        if search.source is None and search.skipped:
            raise _none_to_resume(search, self._doorway.fitting)
        self._chosen = search.source
        return search.source

    def _newest(self, *, reading_checks: bool) -> Search:
        """The newest of ours in the places to search, which is to be the start of this run.

        Raises:
            CrashLoop: starts from what there is have crashed too often.
        """
        places = self._searched
        tried = self._tried_in_vain(places)
        search = find_last(self._ranks, places, self._needs, tried, reading_checks=reading_checks)
        if search.source is not None:
            self._begin_attempt(search.source, [(places[index].tier, name) for index, name in tried])
            self._skipped = search.explain()
        elif tried:
            raise crash_loop([place.tier for place in places], tried)
        return search

    def _tried_in_vain(self, places: list[Place]) -> dict[tuple[int, str], str]:
        """The checkpoint that a run is not to be started from once more, and why, by number of the place and name.

        Raises:
            CrashLoop: there are two already.
        """
        asks = self._ranks.rank == 0 and self._doorway.fitting
        tiers = [place.tier for place in places]
        tried = self._ranks.broadcast(tried_in_vain(tiers, self.max_attempts) if asks else {})
        if len(tried) > 1:
            raise crash_loop(tiers, tried)
        return tried

    def _begin_attempt(self, source: Source, passed_over: list[tuple[LocalTier, str]]) -> None:
        """Count this start, until something shows that it was no crash."""
        is_lasting = source.tier not in self._scratches
        if self._ranks.rank == 0 and self._doorway.fitting and self.max_attempts < math.inf and is_lasting:
            self._attempts = Attempts(source.tier.root)
            self._attempts.begin(source.name, [name for _, name in passed_over])
            known = [source.manifest, *(attempt(partial(store.read_manifest, *one)) for one in passed_over)]
            self._reached = max((one.step for one in known if isinstance(one, Manifest)), default=0)

    def say(self) -> None:
        """One line that says which checkpoint was loaded, if any was."""
        loaded, ranks, skipped = self._chosen, self._ranks, self._skipped
        self._chosen, self._skipped = None, ""
        if ranks.rank != 0 or loaded is None:
            return
        if not isinstance(loaded, Source) or loaded.manifest is None:
            where = loaded.path if isinstance(loaded, Source) else shown(loaded)
            log.info("event=resume from=%s note='a checkpoint of stock Lightning'", where)
            return
        saved = loaded.manifest
        note = f" saved_by={saved.world_size}" if saved.world_size != ranks.world_size else ""
        note += f" skipped={skipped!r}" if skipped else ""
        log.info(
            "event=resume step=%d from=%s %s ranks=%d%s", saved.step, loaded.path, loaded.origin, ranks.world_size, note
        )

    def open_again(self, tier: LocalTier | RemoteTier, name: str, copies: Mapping[str, Manifest]) -> Source:
        """The checkpoint that a run is to be taken back to, made whole; see ``Session.roll_back`` for the arguments.

        Raises:
            CheckpointCorrupt: it is damaged.
        """
        place = self.places.get(tier.where()) or self.place(tier)
        save = next((manifest.save_id for manifest in copies.values()), None)
        try:
            return make_whole(self._ranks, place, name, save=save, copies=copies or None, needs=self._needs)
        except CheckpointCorrupt:
            healed = open_with_copies(self._ranks, place, name, self._needs)
            if healed is None:
                raise
            return healed

    # -- what becomes of a start --------------------------------------------------------------------------------------

    def end(self) -> None:
        """All that was wanted is loaded: give back what was only for that."""
        for folder, is_mine in self._scratches.values():
            if is_mine:
                folder.empty()
        self._leave_memory()

    def _leave_memory(self) -> None:
        """Give back what dead processes left, before there are new slots, or leave it to a run that trains."""
        self._memory.release()
        self._ranks.any_max(0)
        if self._doorway.fitting:
            self._memory.remove()
        self._ranks.any_max(0)

    def succeeded(self, step: float = math.inf) -> None:
        """This start has come to a ``step``, or to its end; not collective.  Steps that earlier ones have been through,
        and that are saved once more, show nothing."""
        if self._attempts is not None and step > self._reached:
            self._attempts.clear()

    def forgive(self) -> None:
        """What ended this start was no crash; not collective."""
        if self._attempts is not None:
            self._attempts.forgive()

    def close(self) -> None:
        """Nothing is looked for any more; not collective."""
        for folder, is_mine in self._scratches.values():
            folder.close(remove=is_mine)
        self._scratches.clear()
        self._memory.release()


def _none_to_resume(search: Search, fitting: bool) -> CheckpointCorrupt | CheckpointIncompatible:
    message = f"There are checkpoints, but none can be resumed from: {search.explain()}."
    if not search.is_damage:
        over = " Set on_unrestorable='fresh', or leave out ckpt_path, to start over." if fitting else ""
        return CheckpointIncompatible(message, hint=f"To load one in trainer.validate or test, give its path.{over}")
    return CheckpointCorrupt(
        message,
        problems=tuple(f"{path}: {why}" for path, why in search.skipped.items()),
        hint="Repair or remove them, or set on_unrestorable='fresh' to start over.",
    )
