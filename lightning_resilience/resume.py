"""A resume: which checkpoint, decided by all ranks together.

Every rank looks at what it can see, the findings are gathered, and all come to the same answer: the newest checkpoint
of which every file is somewhere, whole, by size and digest.  Nothing is unpickled before that.  What a folder lacks is
then brought to it: where folders are node-local, from a node that has it, and otherwise from the cold tier.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lightning_resilience import store
from lightning_resilience.errors import (
    CheckpointCorrupt,
    CheckpointNotFound,
    ResilienceError,
    TierDenied,
    TierUnavailable,
)
from lightning_resilience.manifest import MANIFEST, META, METADATA, FileEntry, Manifest
from lightning_resilience.ranks import Ranks, attempt, raise_first
from lightning_resilience.remote import RemoteTier
from lightning_resilience.tiers import FETCHED, LocalTier

log = logging.getLogger("lightning_resilience")


@dataclass(frozen=True, eq=False)
class Place:
    """Where checkpoints are looked for: a local folder, which ranks share it, and the cold tier behind it."""

    tier: LocalTier
    sharing: tuple[int, ...]
    cold: RemoteTier | None = None

    @classmethod
    def shared(cls, ranks: Ranks, tier: LocalTier, cold: RemoteTier | None = None) -> Place:
        """A folder that all ranks are taken to share."""
        return cls(tier, tuple(range(ranks.world_size)), cold)


@dataclass(frozen=True)
class Source:
    """A checkpoint that every rank can read: verified if it has a manifest; without one it is stock Lightning's."""

    tier: LocalTier
    name: str
    manifest: Manifest | None = None
    fetched: int = 0
    """Bytes that had to be fetched from the cold tier."""

    @property
    def path(self) -> Path:
        return self.tier.path(self.name)

    def locate(self, file: str) -> Path:
        """Path of one of its files."""
        entry = self.manifest.file(file) if self.manifest is not None else None
        return self.tier.path(store.holder(self.name, entry) if entry is not None else self.name, file)


@dataclass
class Search:
    """What a search found: the ``source`` to resume from, or None, and why newer ones were ``skipped``, by path."""

    source: Source | None = None
    skipped: dict[str, str] = field(default_factory=dict)

    def skip(self, path: Path, why: str | ResilienceError, *, aloud: bool) -> None:
        """Note why a checkpoint is not the one; damage is warned of, where ``aloud`` (one rank's word is enough)."""
        if isinstance(why, ResilienceError):
            why = ", ".join(getattr(why, "problems", ())) or why.message
            if aloud:
                log.warning("event=resume skipped=%s reason=%r", path.name, why)
        self.skipped[str(path)] = why

    def explain(self) -> str:
        """The skipped ones and why, in one line."""
        return "; ".join(f"{Path(path).name}: {why}" for path, why in self.skipped.items())


def find_last(
    ranks: Ranks,
    places: Sequence[Place],
    needs: Needs | None = None,
    passed_over: Mapping[tuple[int, str], str] | None = None,
) -> Search:
    """The newest healthy checkpoint in ``places``, or in the cold tiers behind them, that all ranks together can
    restore.  Collective.

    Args:
        ranks: who resumes.
        places: where to look.
        needs: see ``verify_together``.
        passed_over: why not, by number of the place and name of the checkpoint; the same on all ranks.

    Raises:
        TierUnavailable, TierDenied: a cold tier does not answer, and without it there is nothing to resume.
    """
    search = Search()
    candidates: list[tuple[tuple[int, int], int, str, Manifest | None]] = []
    silent: list[ResilienceError] = []
    for index, place in enumerate(places):
        listings = ranks.gathered(lambda place=place: _what_is_there(place.tier))  # type: ignore[misc]
        raise_first(listings)
        found: dict[str, _Finding] = {}
        for listing in reversed(listings):
            assert isinstance(listing, dict)
            found |= {name: what for name, what in listing.items() if not isinstance(found.get(name), tuple)}
            found |= {name: what for name, what in listing.items() if isinstance(what, tuple)}
        cold = _what_is_cold(ranks, place)
        if isinstance(cold, ResilienceError):
            silent.append(cold)
            cold = {}
        for name in {**found, **cold}:
            here, there = found.get(name), cold.get(name)
            if isinstance(here, tuple):
                candidates.append((here, index, name, there if there is not None and there.order == here else None))
            elif there is not None:
                candidates.append((there.order, index, name, there))
            elif here is not None:
                search.skip(place.tier.path(name), here, aloud=ranks.rank == 0)
    for _, index, name, there in sorted(candidates, key=lambda one: one[:3], reverse=True):
        place = places[index]
        if passed_over and (index, name) in passed_over:
            search.skip(place.tier.path(name), passed_over[index, name], aloud=False)
            continue
        try:
            search.source = verify_together(ranks, place, name, there, needs)
            return search
        except (TierUnavailable, TierDenied):
            raise  # it may be whole: an older one, or none, is not the answer to an outage
        except ResilienceError as error:
            search.skip(place.tier.path(name), error, aloud=ranks.rank == 0)
    if silent:
        raise silent[0]
    return search


_Finding = tuple[int, int] | str | ResilienceError
"""Place in the order of a checkpoint that a run may resume from, or why it may not: its nature, or damage."""


def _what_is_there(tier: LocalTier) -> dict[str, _Finding]:
    listing = store.list_checkpoints(tier)
    found: dict[str, _Finding] = {
        name: error
        for name, error in listing.unusable.items()
        if name in tier.names() and not store.is_stock_folder(tier.path(name))
    }
    return found | {name: manifest.unresumable or manifest.order for name, manifest in listing.committed.items()}


def _what_is_cold(ranks: Ranks, place: Place) -> dict[str, Manifest] | ResilienceError:
    """What the cold tier behind a place has to resume from, as rank 0 sees it; or that it does not answer."""
    cold = place.cold
    if cold is None:
        return {}
    listing = ranks.broadcast(attempt(lambda: store.list_checkpoints(cold)) if ranks.rank == 0 else None)
    if isinstance(listing, ResilienceError):
        if ranks.rank == 0:
            log.warning("event=resume tier=cold url=%s error=%r", cold.where(), listing.message)
        return listing
    if isinstance(listing, BaseException):
        raise listing
    assert listing is not None
    return {name: manifest for name, manifest in listing.committed.items() if manifest.unresumable is None}


Needs = Callable[[Source], set[str]]
"""Names of the files of a checkpoint that this rank reads when it loads it, told from the small ones that are there."""


def verify_together(
    ranks: Ranks, place: Place, name: str, there: Manifest | None = None, needs: Needs | None = None
) -> Source:
    """Check every byte of a checkpoint, each file by one rank of each folder, and bring every folder what its ranks
    need, with the bytes of another folder or of the cold tier.  Collective.

    A folder that all ranks share is made whole.  One of several gets the files that its own ranks read, and no more,
    so that a node does not fetch what the others hold.

    Args:
        ranks: who checks.
        place: where.
        name: of the checkpoint.
        there: its manifest in the cold tier, if it is there.
        needs: tells what this rank reads; all of it if None.

    Raises:
        CheckpointCorrupt: a file is damaged or missing everywhere; on all ranks.
        CheckpointNotFound, CheckpointUncommitted, CheckpointIncompatible: there is no manifest to go by.
    """
    tier = place.tier
    manifests = ranks.gathered(lambda: store.read_manifest(tier, name))
    good = [manifest for manifest in manifests if isinstance(manifest, Manifest)]
    if not good and there is None:
        raise_first(manifests)
    manifest = good[0] if good else there
    assert manifest is not None
    source = Source(tier, name, manifest)
    found = _look(ranks, place, name, manifest)
    if (lost := found.lost) and there is None:
        raise CheckpointCorrupt(f"{name} is damaged: {'; '.join(lost.values())}.", problems=tuple(lost.values()))
    small = {METADATA, META}
    fetched = _bring(ranks, place, source, found, small)
    mine = manifest.paths - small
    if found.lacking and needs is not None and len(place.sharing) < ranks.world_size:
        needed = ranks.gathered(lambda: needs(source))
        raise_first(needed)
        mine &= set().union(*(needed[rank] for rank in place.sharing))  # type: ignore[arg-type]
    fetched += _bring(ranks, place, source, found, mine)
    lacks = isinstance(manifests[ranks.rank], BaseException) and ranks.rank == place.sharing[0]
    raise_first(ranks.gathered(lambda: tier.put_manifest(name, manifest.to_bytes()) if lacks else None))
    return replace(source, fetched=sum(ranks.all_gather(fetched)))


@dataclass
class _Found:
    """Where the files of a checkpoint are: of each, the ``holding`` folder (by the rank of its leader) that has it
    whole, and the folders that are ``lacking`` it, and why."""

    holding: dict[str, int] = field(default_factory=dict)
    lacking: dict[str, dict[int, str]] = field(default_factory=dict)

    @property
    def lost(self) -> dict[str, str]:
        """The files that no folder has, and why not."""
        return {file: next(iter(why.values())) for file, why in self.lacking.items() if file not in self.holding}


def _look(ranks: Ranks, place: Place, name: str, manifest: Manifest) -> _Found:
    """Check the files of a checkpoint in every folder, shared out over the ranks that share it.  Collective."""
    mine = manifest.files[place.sharing.index(ranks.rank) :: len(place.sharing)]
    checked = ranks.gathered(lambda: {entry.path: store.content_problem(place.tier, name, entry) for entry in mine})
    raise_first(checked)
    found = _Found()
    for leader, findings in zip(ranks.all_gather(place.sharing[0]), checked, strict=True):
        assert isinstance(findings, dict)
        for file, problem in findings.items():
            if problem is None:
                found.holding.setdefault(file, leader)
            else:
                found.lacking.setdefault(file, {})[leader] = problem
    return found


def _bring(ranks: Ranks, place: Place, source: Source, found: _Found, files: Collection[str]) -> int:
    """Bring this rank's folder those of ``files`` that it lacks.  Collective, with other files in each folder.

    Returns:
        Bytes that this rank fetched from the cold tier.
    """
    manifest, leader = source.manifest, place.sharing[0]
    assert manifest is not None
    lost = found.lost.keys()
    wanted = {file for file in files if leader in found.lacking.get(file, ())}
    fetched = 0
    if lost:
        fetched = _fetch(ranks, place, source.name, [entry for entry in manifest if entry.path in wanted & lost])
    sinks: dict[str, set[int]] = {}
    for sink, names in ranks.all_gather((leader, sorted(wanted - lost))):
        for file in names:
            sinks.setdefault(file, set()).add(sink)
    for file in sorted(sinks):
        _copy(ranks, place, source.name, manifest.file(file), found.holding[file], sinks[file])
    return fetched


def _fetch(ranks: Ranks, place: Place, name: str, entries: Sequence[FileEntry]) -> int:
    """Bring files from the cold tier to this rank's folder, shared out over the ranks that share it; the bytes that
    this rank fetched."""
    cold, tier = place.cold, place.tier
    assert cold is not None
    mine = entries[place.sharing.index(ranks.rank) :: len(place.sharing)]

    def fetch_mine() -> None:
        for entry in mine:
            target = tier.path(name, entry.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            sink = target.with_name(f".{entry.path}{FETCHED}{uuid.uuid4().hex[:12]}")
            try:
                cold.fetch(name, entry, sink)
                os.replace(sink, target)
            except FileNotFoundError as error:
                raise CheckpointCorrupt(f"{error}", problems=(f"{entry.path} is missing in {cold.where()}",)) from error
            finally:
                sink.unlink(missing_ok=True)
            log.info("event=heal name=%s file=%s from=%s", name, entry.path, cold.where())
        tier.begin(name)
        tier.sync(name)

    raise_first(ranks.gathered(fetch_mine))
    return sum(entry.size for entry in mine)


def _copy(ranks: Ranks, place: Place, name: str, entry: FileEntry | None, source: int, sinks: set[int]) -> None:
    """Bring a file to the folders that lack it, from the leader of one that has it."""
    assert entry is not None
    tier, holder = place.tier, store.holder(name, entry)
    target = tier.path(holder, entry.path)
    sink = None
    if ranks.rank in sinks:
        target.parent.mkdir(parents=True, exist_ok=True)
        sink = target.with_name(f".{entry.path}{FETCHED}{uuid.uuid4().hex[:12]}")
    try:
        ranks.copy_file(source, target, sink)
        raise_first(ranks.gathered(lambda: _take_in(tier, holder, entry, sink)))
    finally:
        if sink is not None:
            sink.unlink(missing_ok=True)
    if sink is not None:
        log.info("event=heal name=%s file=%s from_rank=%d", name, entry.path, source)


def _take_in(tier: LocalTier, holder: str, entry: FileEntry, sink: Path | None) -> None:
    """Put a copied file in its place, if it is what the manifest says."""
    if sink is None:
        return
    if tier.digest(holder, sink.name) != entry.xxh3_128:
        raise CheckpointCorrupt(f"{entry.path} was damaged on its way here.", problems=(f"{entry.path}: bad copy",))
    os.replace(sink, tier.path(holder, entry.path))
    tier.sync(holder)


def open_explicit(ranks: Ranks, path: Path, place: Place | None = None, needs: Needs | None = None) -> Source:
    """The checkpoint at a path that the user named.  Collective.

    Args:
        ranks: who opens it.
        path: where it is on this rank.
        place: the folder it is in, where it is known who shares that; otherwise all ranks are taken to.
        needs: see ``verify_together``.

    Raises:
        CheckpointNotFound, CheckpointUncommitted: nothing usable is there; the message lists what is.
        CheckpointCorrupt: it is damaged.
    """
    opened = ranks.gathered(lambda: _open(path))
    raise_first(opened)
    source = opened[ranks.rank]
    assert isinstance(source, Source)
    if source.manifest is None:
        return source
    try:
        return verify_together(ranks, place or Place.shared(ranks, source.tier), source.name, needs=needs)
    except CheckpointCorrupt as error:
        raise CheckpointCorrupt(error.message, problems=error.problems, hint=store.available(source.tier)) from error


def _open(path: Path) -> Source:
    if path.is_dir() and store.is_stock_folder(path):
        return Source(LocalTier(path.parent), path.name)
    if path.is_dir() and not (path / MANIFEST).exists() and LocalTier(path).names():
        raise CheckpointNotFound(f"{str(path)!r} is a folder of checkpoints.", hint=store.available(LocalTier(path)))
    tier, name, manifest = store.open_checkpoint(path)
    return Source(tier, name, manifest)
