"""A resume: which checkpoint, decided by all ranks together.

Every rank looks at what it can see, the findings are gathered, and all come to the same answer: the newest checkpoint
of which every file is somewhere, whole, as far as that is known before it is read (see ``heal``).  Nothing is
unpickled before its digest has matched.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning_resilience import store
from lightning_resilience.errors import (
    CheckpointCorrupt,
    CheckpointNotFound,
    ResilienceError,
    TierDenied,
    TierUnavailable,
)
from lightning_resilience.heal import make_whole, read_by_leaders
from lightning_resilience.manifest import MANIFEST, Manifest, outlined
from lightning_resilience.places import Needs, Place, Source
from lightning_resilience.ranks import Ranks, attempt, raise_first
from lightning_resilience.tiers import LocalTier

log = logging.getLogger("lightning_resilience")


@dataclass
class Search:
    """What a search found: the ``source`` to resume from, or None, and why newer ones were ``skipped``, by path."""

    source: Source | None = None
    skipped: dict[str, str] = field(default_factory=dict)
    is_damage: bool = False
    """Whether damage is among the reasons."""

    def skip(self, where: str, why: str | ResilienceError, *, aloud: bool) -> None:
        """Note why the checkpoint at a path or URL is not the one; damage is warned of, where ``aloud`` (one rank's
        word is enough)."""
        if isinstance(why, ResilienceError):
            self.is_damage = True
            why = ", ".join(getattr(why, "problems", ())) or why.message
            if aloud:
                log.warning("event=resume skipped=%s reason=%r", _called(where), why)
        self.skipped[where] = why

    def explain(self) -> str:
        """The skipped ones and why, in one line."""
        return "; ".join(f"{_called(where)}: {why}" for where, why in self.skipped.items())


def _called(where: str) -> str:
    """What people call it: by its name in a folder, by its URL elsewhere."""
    return where if "://" in where else Path(where).name


@dataclass(frozen=True)
class _Seen:
    """A checkpoint as a list shows it: which ``save`` it is, its place in the ``order``, and why a run may not resume
    from it, if it may not."""

    save: str
    order: tuple[int, int]
    unresumable: str | None

    @classmethod
    def of(cls, manifest: Manifest) -> _Seen:
        return cls(manifest.save_id, manifest.order, manifest.unresumable)


@dataclass
class _Candidate:
    """A save that a place has, in some of its folders, in its cold tier, or in both, under whatever names: its
    ``name`` is that of the lowest rank that has it, or else of a copy."""

    place_number: int
    seen: _Seen
    name: str
    ranks: dict[int, str] = field(default_factory=dict)
    """What it is called in the folder of each rank that has it."""
    copies: dict[str, Manifest] = field(default_factory=dict)
    """What it is called in the cold tier, and its manifest there."""
    passed_over: str = ""
    """Why it is not to be tried, if it is not."""

    def rank_in_order(self) -> tuple[tuple[int, int], int, bool, str]:
        """Sorts candidates from old to new, on all ranks alike."""
        return self.seen.order, self.place_number, bool(self.ranks), self.seen.save

    def where(self, place: Place) -> str:
        """Path or URL of it, for people."""
        return place.cold.where(self.name) if place.cold is not None and not self.ranks else place.tier.where(self.name)

    def may_be(self, found: _Finding | None) -> bool:
        """Whether it may be what was ``found`` under its name."""
        return not isinstance(found, _Seen) or found.save == self.seen.save


def find_last(
    ranks: Ranks,
    places: Sequence[Place],
    needs: Needs | None = None,
    passed_over: Mapping[tuple[int, str], str] = {},
    *,
    reading_checks: bool = False,
) -> Search:
    """The newest healthy save in ``places``, or in the cold tiers behind them, that all ranks together can restore.
    Collective.

    A save is what it is whatever it is called: folders and the cold tier may have different ones under one name, and
    one under different names.

    Args:
        ranks: who resumes.
        places: where to look.
        needs: see ``make_whole``.
        passed_over: why not, by number of the place and name in rank 0's folder; the same on all ranks.
        reading_checks: whether what is found may be damaged, as will be found out while it is read; see ``make_whole``.

    Raises:
        TierUnavailable, TierDenied: a cold tier does not answer, and without it there is nothing to resume, or only
            something older than what it may have whole; or a folder cannot be written.
    """
    search, aloud = Search(), ranks.rank == 0
    candidates, broken, silent = _candidates(ranks, places, passed_over)
    for where, damage in broken.items():
        search.skip(where, damage, aloud=aloud)
    for candidate in sorted(candidates, key=_Candidate.rank_in_order, reverse=True):
        place = places[candidate.place_number]
        where = candidate.where(place)
        if why_not := candidate.passed_over or candidate.seen.unresumable:
            search.skip(where, why_not, aloud=False)
            continue
        try:
            search.source = _made_whole(ranks, place, candidate, needs, reading_checks)
            return search
        except (TierUnavailable, TierDenied):
            raise  # it may be whole: an older one, or none, is not the answer to an outage
        except ResilienceError as error:
            if candidate.place_number in silent:
                raise silent[candidate.place_number] from error  # for the same reason
            search.skip(where, error, aloud=aloud)
    if silent:
        raise next(iter(silent.values()))
    return search


def _made_whole(ranks: Ranks, place: Place, candidate: _Candidate, needs: Needs | None, reading_checks: bool) -> Source:
    def make(reading_checks: bool) -> Source:
        return make_whole(
            ranks,
            place,
            candidate.name,
            save=candidate.seen.save,
            copies=candidate.copies,
            needs=needs,
            reading_checks=reading_checks,
        )

    if reading_checks:
        with suppress(CheckpointCorrupt):  # on all ranks
            return make(reading_checks=True)
    return make(reading_checks=False)


def _candidates(
    ranks: Ranks, places: Sequence[Place], passed_over: Mapping[tuple[int, str], str]
) -> tuple[list[_Candidate], dict[str, ResilienceError], dict[int, ResilienceError]]:
    """The saves that ``places`` have, what is broken there, by its path or URL, and which cold tiers do not answer, by
    number of the place.  Collective."""
    candidates: list[_Candidate] = []
    broken: dict[str, ResilienceError] = {}
    silent: dict[int, ResilienceError] = {}
    for index, place in enumerate(places):
        here = _what_is_here(ranks, place)
        there = _what_is_cold(ranks, place)
        if isinstance(there, ResilienceError):
            silent[index], there = there, {}
        saves = _saves(index, here, there)
        names = {name for save in saves for name in (*save.ranks.values(), *save.copies)}
        for name, found in ((name, found) for listing in here for name, found in listing.items() if name not in names):
            if isinstance(found, ResilienceError):
                broken[place.tier.where(name)] = found
        for name, manifest in there.items():
            if isinstance(manifest, ResilienceError) and place.cold is not None:
                broken[place.cold.where(name)] = manifest
        for save in saves:
            if save.may_be(here[0].get(save.name)):
                save.passed_over = passed_over.get((index, save.name), "")
        candidates += saves
    return candidates, broken, silent


_Finding = _Seen | ResilienceError
"""A checkpoint, or why there is none although something is there."""


def _what_is_there(tier: LocalTier, but: Collection[str] = ()) -> dict[str, _Finding]:
    listing = store.list_checkpoints(tier, but=but)
    found: dict[str, _Finding] = {
        name: error
        for name, error in listing.unusable.items()
        if name in tier.names() and not store.is_stock_folder(tier.path(name))
    }
    return found | {name: _Seen.of(manifest) for name, manifest in listing.committed.items()}


def _what_is_here(ranks: Ranks, place: Place) -> list[dict[str, _Finding]]:
    """What the folder of each rank has: as the first of those that share it lists it, because manifests are as long as
    there are ranks, and what another one sees besides, because a list may be older than what there is.  Collective."""
    leader = place.leader
    listings: list[Any] = ranks.gathered(lambda: _what_is_there(place.tier) if ranks.rank == leader else {})
    raise_first(listings)
    here: dict[str, _Finding] = listings[leader]
    others: list[Any] = ranks.gathered(lambda: (leader, _what_is_there(place.tier, here)))
    raise_first(others)
    return [{**listings[of_rank], **besides} for of_rank, besides in others]


def _what_is_cold(ranks: Ranks, place: Place) -> dict[str, Manifest | ResilienceError] | ResilienceError:
    """What the cold tier behind a place has, as rank 0 sees it (the files are known to it alone), and why not where it
    is damaged; or that it does not answer.  Collective."""
    cold = place.cold
    if cold is None:
        return {}
    found = attempt(lambda: store.list_checkpoints(cold)) if ranks.rank == 0 else None
    told = replace(found, committed=outlined(found.committed)) if isinstance(found, store.Listing) else found
    listing = ranks.broadcast(told)
    if isinstance(listing, (TierUnavailable, TierDenied)):
        if ranks.rank == 0:
            log.warning("event=resume tier=cold url=%s error=%r", cold.where(), listing.message)
        return listing
    if isinstance(listing, BaseException):
        raise listing
    assert listing is not None
    known = found.committed if isinstance(found, store.Listing) else listing.committed
    return {**listing.damaged, **known}


def _saves(
    place_number: int, here: Sequence[Mapping[str, _Finding]], there: Mapping[str, Manifest | ResilienceError]
) -> list[_Candidate]:
    """The saves of a place, from the lists of its ranks and of its cold tier."""
    saves: dict[str, _Candidate] = {}
    for rank, listing in enumerate(here):
        for name, seen in sorted(listing.items(), key=lambda item: item[0]):
            if isinstance(seen, _Seen):
                saves.setdefault(seen.save, _Candidate(place_number, seen, name)).ranks.setdefault(rank, name)
    for name, manifest in sorted(there.items(), key=lambda item: item[0]):
        if isinstance(manifest, Manifest):
            seen = _Seen.of(manifest)
            saves.setdefault(seen.save, _Candidate(place_number, seen, name)).copies[name] = manifest
    return list(saves.values())


def open_explicit(ranks: Ranks, path: Path, place: Place | None = None, needs: Needs | None = None) -> Source:
    """The checkpoint at a path that the user named.  Collective.

    Args:
        ranks: who opens it.
        path: where it is on this rank.
        place: the folder it is in, where it is known who shares that; otherwise all ranks are taken to.
        needs: see ``make_whole``.

    Raises:
        CheckpointNotFound, CheckpointUncommitted: nothing usable is there; the message lists what is.
        CheckpointCorrupt: it is damaged.
    """
    opened: list[Source] = []
    raise_first(ranks.gathered(lambda: opened.append(_open(path))))
    (source,) = opened
    if source.manifest is None:
        return source
    try:
        return make_whole(ranks, place or Place.shared(ranks, source.tier), source.name, needs=needs)
    except CheckpointCorrupt as error:
        raise CheckpointCorrupt(error.message, problems=error.problems, hint=store.available(source.tier)) from error


def open_with_copies(ranks: Ranks, place: Place, name: str, needs: Needs | None = None) -> Source | None:
    """The save that a folder has under a name, made whole from the other folders and from its copies in the cold tier,
    whatever those are called; None where no folder knows which save that is.  Collective.

    Raises:
        CheckpointCorrupt: a file is damaged or missing everywhere.
        TierUnavailable, TierDenied: the cold tier does not answer.
    """
    _, told = read_by_leaders(ranks, place, name)
    known = [one for one in told if isinstance(one, Manifest)]
    if not known:
        return None
    there = _what_is_cold(ranks, place)
    if isinstance(there, ResilienceError):
        raise there
    copies = {one: it for one, it in there.items() if isinstance(it, Manifest) and it.is_same_save(known[0])}
    return make_whole(ranks, place, name, save=known[0].save_id, copies=copies, needs=needs)


def _open(path: Path) -> Source:
    if path.is_dir() and store.is_stock_folder(path):
        return Source(LocalTier(path.parent), path.name)
    if path.is_dir() and not (path / MANIFEST).exists() and LocalTier(path).names():
        raise CheckpointNotFound(f"{str(path)!r} is a folder of checkpoints.", hint=store.available(LocalTier(path)))
    tier, name, manifest = store.open_checkpoint(path)
    return Source(tier, name, manifest)
