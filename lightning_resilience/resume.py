"""A resume: which checkpoint, decided by all ranks together.

Every rank looks at what it can see, the findings are gathered, and all come to the same answer: the newest checkpoint
of which every file is somewhere, whole, by size and digest.  Nothing is unpickled before that.  What a killed process
left in the memory of a node is read there.  What a folder lacks is brought to it: from memory, where folders are
node-local from a node that has it, and otherwise from the cold tier.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning_resilience import memory, store
from lightning_resilience.errors import (
    CheckpointCorrupt,
    CheckpointNotFound,
    CheckpointUncommitted,
    ResilienceError,
    TierDenied,
    TierUnavailable,
)
from lightning_resilience.manifest import MANIFEST, META, METADATA, PARTIAL, SHARD, FileEntry, Manifest, outlined
from lightning_resilience.memory import MemoryTier
from lightning_resilience.ranks import Ranks, attempt, raise_first
from lightning_resilience.remote import RemoteTier
from lightning_resilience.tiers import LocalTier

log = logging.getLogger("lightning_resilience")


@dataclass(frozen=True, eq=False)
class Place:
    """Where checkpoints are looked for: a local folder, which ranks share it, the cold tier behind it, and the memory
    of this node before it.

    Args:
        tier: the folder.
        sharing: ranks that share it.
        cold: what is behind it.
        memory: what is before it; None for all ranks or for none.
        passing: whether the folder is only there for what is fetched, as long as that is read.
    """

    tier: LocalTier
    sharing: tuple[int, ...]
    cold: RemoteTier | None = None
    memory: MemoryTier | None = None
    passing: bool = False

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
    copies: tuple[str, ...] = ()
    """What its copies in the cold tier are called."""
    in_memory: Mapping[str, Path] = field(default_factory=dict)
    """Where the files are that this node's memory has whole."""
    shards_in_memory: tuple[int, int] = (0, 0)
    """Of how many of the ranks that wrote it the shards are read in memory, and how many there are."""
    from_folder: bool = True
    """Whether any file is read in a folder that was not fetched for it."""

    @property
    def path(self) -> Path:
        return self.tier.path(self.name)

    def locate(self, file: str) -> Path:
        """Path of one of its files, to read it."""
        return self.in_memory.get(file) or self.home(file)

    def home(self, file: str) -> Path:
        """Path of one of its files in the folder."""
        entry = self.manifest.file(file) if self.manifest is not None else None
        return self.tier.path(store.holder(self.name, entry) if entry is not None else self.name, file)


@dataclass
class Search:
    """What a search found: the ``source`` to resume from, or None, and why newer ones were ``skipped``, by path."""

    source: Source | None = None
    skipped: dict[str, str] = field(default_factory=dict)

    def skip(self, where: Path | str, why: str | ResilienceError, *, aloud: bool) -> None:
        """Note why the checkpoint at a path or URL is not the one; damage is warned of, where ``aloud`` (one rank's
        word is enough)."""
        if isinstance(why, ResilienceError):
            why = ", ".join(getattr(why, "problems", ())) or why.message
            if aloud:
                log.warning("event=resume skipped=%s reason=%r", _called(str(where)), why)
        self.skipped[str(where)] = why

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

    place: int
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
        return self.seen.order, self.place, bool(self.ranks), self.seen.save

    def may_be(self, found: _Finding | None) -> bool:
        """Whether it may be what was ``found`` under its name."""
        return not isinstance(found, _Seen) or found.save == self.seen.save


def find_last(
    ranks: Ranks,
    places: Sequence[Place],
    needs: Needs | None = None,
    passed_over: Mapping[tuple[int, str], str] | None = None,
) -> Search:
    """The newest healthy save in ``places``, or in the cold tiers behind them, that all ranks together can restore.
    Collective.

    A save is what it is whatever it is called: folders and the cold tier may have different ones under one name, and
    one under different names.

    Args:
        ranks: who resumes.
        places: where to look.
        needs: see ``verify_together``.
        passed_over: why not, by number of the place and name in rank 0's folder; the same on all ranks.

    Raises:
        TierUnavailable, TierDenied: a cold tier does not answer, and without it there is nothing to resume, or only
            something older than what it may have whole.
    """
    search, aloud = Search(), ranks.rank == 0
    candidates: list[_Candidate] = []
    silent: dict[int, ResilienceError] = {}
    for index, place in enumerate(places):
        here = _what_is_here(ranks, place)
        there = _what_is_cold(ranks, place)
        if isinstance(there, ResilienceError):
            silent[index], there = there, {}
        saves = _saves(index, here, there)
        names = {name for save in saves for name in (*save.ranks.values(), *save.copies)}
        broken = {place.tier.path(name): what for one in here for name, what in one.items() if name not in names}
        for path, why in broken.items():
            if isinstance(why, ResilienceError):
                search.skip(path, why, aloud=aloud)
        for name, manifest in there.items():
            if isinstance(manifest, ResilienceError) and place.cold is not None:
                search.skip(place.cold.where(name), manifest, aloud=aloud)
        for save in saves:
            if (index, save.name) in (passed_over or {}) and save.may_be(here[0].get(save.name)):
                save.passed_over = (passed_over or {})[index, save.name]
        candidates += saves
    for save in sorted(candidates, key=_Candidate.rank_in_order, reverse=True):
        place = places[save.place]
        where = place.cold.where(save.name) if place.cold is not None and not save.ranks else place.tier.path(save.name)
        if why_not := save.passed_over or save.seen.unresumable:
            search.skip(where, why_not, aloud=False)
            continue
        try:
            search.source = verify_together(
                ranks, place, save.name, save=save.seen.save, copies=save.copies, needs=needs
            )
            return search
        except (TierUnavailable, TierDenied):
            raise  # it may be whole: an older one, or none, is not the answer to an outage
        except ResilienceError as error:
            if save.place in silent:
                raise silent[save.place] from error  # for the same reason
            search.skip(where, error, aloud=aloud)
    if silent:
        raise next(iter(silent.values()))
    return search


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
    leader = place.sharing[0]
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
    place: int, here: Sequence[Mapping[str, _Finding]], there: Mapping[str, Manifest | ResilienceError]
) -> list[_Candidate]:
    """The saves of a place, from the lists of its ranks and of its cold tier."""
    saves: dict[str, _Candidate] = {}
    for rank, listing in enumerate(here):
        for name, seen in sorted(listing.items(), key=lambda item: item[0]):
            if isinstance(seen, _Seen):
                saves.setdefault(seen.save, _Candidate(place, seen, name)).ranks.setdefault(rank, name)
    for name, manifest in sorted(there.items(), key=lambda item: item[0]):
        if isinstance(manifest, Manifest):
            seen = _Seen.of(manifest)
            saves.setdefault(seen.save, _Candidate(place, seen, name)).copies[name] = manifest
    return list(saves.values())


Needs = Callable[[Source], set[str]]
"""Names of the files of a checkpoint that this rank reads when it loads it, told from the small ones that are there."""


def verify_together(
    ranks: Ranks,
    place: Place,
    name: str,
    *,
    save: str | None = None,
    copies: Mapping[str, Manifest] | None = None,
    needs: Needs | None = None,
) -> Source:
    """Check every byte of a checkpoint, each file by one rank of each folder, and bring every folder what its ranks
    need, with the bytes of another folder or of the cold tier.  Collective.

    A folder that all ranks share is made whole.  One of several gets the files that its own ranks read, and no more,
    so that a node does not fetch what the others hold.  Where a folder has another save under that name, neither is
    touched for the other: it gets a name that is free.

    Args:
        ranks: who checks.
        place: where.
        name: of the checkpoint.
        save: which save is meant; the one that the lowest rank has under that name if None.
        copies: its copies in the cold tier, by their names there.
        needs: tells what this rank reads; all of it if None.

    Raises:
        CheckpointCorrupt: a file is damaged or missing everywhere; on all ranks.
        CheckpointNotFound, CheckpointUncommitted, CheckpointIncompatible: there is no manifest to go by.
    """
    tier, leads = place.tier, ranks.rank == place.sharing[0]
    manifest = _manifest_of(ranks, place, name, save, copies or {})

    def spot_here() -> _Spot:
        spot = _spot(tier, name, manifest)
        return spot if spot.manifest != manifest else replace(spot, manifest=None)  # it grows with the ranks

    spots = ranks.gathered(lambda: spot_here() if leads else None)
    raise_first(spots)
    spot = spots[place.sharing[0]]
    assert isinstance(spot, _Spot)
    spot = replace(spot, manifest=spot.manifest or manifest)
    recalled = _recall(ranks, place.memory, manifest)
    source = Source(tier, spot.work, spot.manifest, copies=tuple(copies or ()), in_memory=recalled[ranks.rank])
    found = _look(ranks, place, source, recalled)
    if (lost := found.lost) and not copies:
        raise CheckpointCorrupt(f"{name} is damaged: {'; '.join(lost.values())}.", problems=tuple(lost.values()))
    with ExitStack() as held:
        raise_first(ranks.gathered(lambda: spot.begin(tier, held) if leads else None))
        small = {METADATA, META}
        fetched = _bring(ranks, place, source, found, small)
        mine = manifest.paths - small
        if found.lacking and needs is not None and len(place.sharing) < ranks.world_size:
            needed = ranks.gathered(lambda: needs(source))
            raise_first(needed)
            mine &= set().union(*(needed[rank] for rank in place.sharing))  # type: ignore[arg-type]
        fetched += _bring(ranks, place, source, found, mine)
        raise_first(ranks.gathered(lambda: spot.finish(tier) if leads else None))
    return replace(source, name=spot.name, fetched=sum(ranks.all_gather(fetched)), **found.origins(manifest))


def _read_by_leaders(
    ranks: Ranks, place: Place, name: str
) -> tuple[Manifest | BaseException | None, list[Manifest | BaseException | None]]:
    """The manifest of a checkpoint, or why there is none, as the first rank of each folder reads it (None on others):
    this rank's, and all of them without their files.  Collective."""
    mine = attempt(lambda: store.read_manifest(place.tier, name)) if ranks.rank == place.sharing[0] else None
    return mine, ranks.all_gather(mine.outline() if isinstance(mine, Manifest) else mine)


def _manifest_of(ranks: Ranks, place: Place, name: str, save: str | None, copies: Mapping[str, Manifest]) -> Manifest:
    """The manifest of a save, as the first folder has it under ``name``, or else the cold tier.
    It grows with the number of ranks, so it is told once, and only what tells saves apart is told by all."""
    mine, told = _read_by_leaders(ranks, place, name)
    having = [rank for rank, one in enumerate(told) if isinstance(one, Manifest) and save in (None, one.save_id)]
    if having:
        found = ranks.broadcast(mine, having[0])
    elif copies:
        found = ranks.broadcast(next(iter(copies.values())))  # as rank 0 knows it
    else:
        raise_first([one for one in told if one is not None])
        raise CheckpointNotFound(f"{name} is another save's.")
    assert isinstance(found, Manifest)
    return found


@dataclass(frozen=True)
class _Spot:
    """Where a folder has a save, or gets it.

    Args:
        name: what it is called there.
        work: where its files are: under its name, or in a folder that becomes it once it is whole.
        manifest: which files; None where they are as the first folder has them.
        has_manifest: whether that is there.
    """

    name: str
    work: str
    manifest: Manifest | None
    has_manifest: bool = False

    def begin(self, tier: LocalTier, held: ExitStack) -> None:
        """Get ready for files: what is not whole in the end is taken away again."""
        if self.work != self.name:
            tier.begin(self.work)
            held.callback(tier.discard, self.work)
            held.enter_context(tier.hold(self.work))

    def finish(self, tier: LocalTier) -> None:
        """All that is needed is there: let it be a checkpoint."""
        assert self.manifest is not None
        if self.work != self.name:
            store.commit(tier, self.work, self.name, self.manifest)
        elif not self.has_manifest:
            tier.put_manifest(self.name, self.manifest.to_bytes())


def _spot(tier: LocalTier, name: str, manifest: Manifest) -> _Spot:
    """Where a folder has a save, whatever it is called there, or else where it gets it."""
    there = attempt(lambda: store.read_manifest(tier, name))  # a list may be older than what there is
    if isinstance(there, Manifest) and there.is_same_save(manifest):
        return _Spot(name, name, there, has_manifest=True)
    listing = store.list_checkpoints(tier)
    names = [one for one, known in listing.committed.items() if known.is_same_save(manifest)]
    if names:
        return _Spot(names[0], names[0], listing.committed[names[0]], has_manifest=True)
    alone, why = manifest.standing_alone(), listing.unusable.get(name)
    if isinstance(why, (CheckpointCorrupt, CheckpointUncommitted)) and not store.is_stock_folder(tier.path(name)):
        return _Spot(name, name, alone)  # of no use as it is, so what is there may be put right
    free = store.free_name(name, tier.exists)
    return _Spot(free, f"{free}{PARTIAL}{uuid.uuid4().hex[:12]}-0", alone)


def _recall(ranks: Ranks, tier: MemoryTier | None, manifest: Manifest) -> list[Mapping[str, Path]]:
    """Where each rank finds files of a checkpoint, whole, in the memory of its node; read by one of its ranks each.
    Collective."""
    if tier is None:
        return [{}] * ranks.world_size
    claims = tier.claims(manifest)
    everyone = ranks.all_gather((tier.node, frozenset(claims)))
    if not any(files for _, files in everyone):
        return [{}] * ranks.world_size
    neighbours = [rank for rank, (node, _) in enumerate(everyone) if node == tier.node]
    mine = {}
    for entry in manifest:
        able = [rank for rank in neighbours if entry.path in everyone[rank][1]]
        if able and able[entry.rank % len(able)] == ranks.rank:
            mine[entry.path] = memory.whole(entry, claims[entry.path])
    checked = ranks.all_gather({file: path for file, path in mine.items() if path is not None})
    of_nodes: dict[tuple[object, ...], dict[str, Path]] = {}
    for (node, _), files in zip(everyone, checked, strict=True):
        of_nodes.setdefault(node, {}).update(files)
    return [of_nodes[node] for node, _ in everyone]


@dataclass
class _Found:
    """Where the files of a checkpoint are: of each, a rank ``holding`` it whole, in its folder or in memory, and the
    folders (by the rank of their leader) that are ``lacking`` it, and why; and which are read ``in_memory``, which in a
    folder."""

    holding: dict[str, int] = field(default_factory=dict)
    lacking: dict[str, dict[int, str]] = field(default_factory=dict)
    in_memory: set[str] = field(default_factory=set)
    in_folders: set[str] = field(default_factory=set)

    def origins(self, manifest: Manifest) -> dict[str, Any]:
        """What a ``Source`` says of where its files are read."""
        shards = [entry for entry in manifest if entry.path.endswith(SHARD)]
        writers = {entry.rank for entry in shards}
        elsewhere = {entry.rank for entry in shards if entry.path not in self.in_memory - self.in_folders}
        numbers = len(writers - elsewhere), len(writers)
        return {"shards_in_memory": numbers, "from_folder": bool(self.in_folders)}

    @property
    def lost(self) -> dict[str, str]:
        """The files that nobody has, and why not."""
        return {file: next(iter(why.values())) for file, why in self.lacking.items() if file not in self.holding}


def _look(ranks: Ranks, place: Place, source: Source, recalled: Sequence[Mapping[str, Path]]) -> _Found:
    """Check the files of a checkpoint in every folder, shared out over the ranks that share it.  Collective.

    What all of them read in memory is not read in the folder, which must have it all the same: memory goes.
    """
    assert source.manifest is not None
    mine = source.manifest.files[place.sharing.index(ranks.rank) :: len(place.sharing)]

    def is_recalled(file: str, sharing: Sequence[int]) -> bool:
        return all(file in recalled[rank] for rank in sharing)

    def problem_of(entry: FileEntry) -> str | None:
        if not is_recalled(entry.path, place.sharing):
            return store.content_problem(source.tier, source.name, entry)
        return None if place.passing else store.size_problem(source.tier, source.name, entry)

    checked = ranks.gathered(lambda: {entry.path: problem_of(entry) for entry in mine})
    raise_first(checked)
    found = _Found()
    for rank, files in enumerate(recalled):
        for file in files:
            found.holding.setdefault(file, rank)
            found.in_memory.add(file)
    for sharing, findings in zip(ranks.all_gather(place.sharing), checked, strict=True):
        assert isinstance(findings, dict)
        for file, problem in findings.items():
            if problem is not None:
                found.lacking.setdefault(file, {})[sharing[0]] = problem
                continue
            found.holding.setdefault(file, sharing[0])
            if not is_recalled(file, sharing):
                found.in_folders.add(file)
    return found


def _bring(ranks: Ranks, place: Place, source: Source, found: _Found, files: Collection[str]) -> int:
    """Bring this rank's folder those of ``files`` that it lacks.  Collective, with other files in each folder.

    Returns:
        Bytes that this rank fetched from the cold tier.
    """
    assert source.manifest is not None
    leader, lost = place.sharing[0], found.lost.keys()
    wanted = [entry for entry in source.manifest if entry.path in files and leader in found.lacking.get(entry.path, ())]
    fetched = 0
    if lost:
        fetched = _fetch(ranks, place, source, [entry for entry in wanted if entry.path in lost])

    def make_room() -> list[str]:
        """As leader of a folder, get it ready for what others have; what that is."""
        elsewhere = [entry for entry in wanted if entry.path not in lost] if ranks.rank == leader else []
        for entry in elsewhere:
            source.tier.begin(store.holder(source.name, entry))
        return [entry.path for entry in elsewhere]

    answers: list[Any] = ranks.gathered(make_room)
    raise_first(answers)
    sinks: dict[str, set[int]] = {}
    for rank, paths in enumerate(answers):
        for file in paths:
            sinks.setdefault(file, set()).add(rank)
    for entry in source.manifest:
        if entry.path in sinks:
            _copy(ranks, source, entry, found.holding[entry.path], sinks[entry.path])
    return fetched


def _fetch(ranks: Ranks, place: Place, source: Source, entries: Sequence[FileEntry]) -> int:
    """Bring files from the cold tier to this rank's folder, shared out over the ranks that share it; the bytes that
    this rank fetched."""
    cold = place.cold
    assert cold is not None
    mine = entries[place.sharing.index(ranks.rank) :: len(place.sharing)]

    def fetch_mine() -> None:
        for entry in mine:
            source.tier.begin(store.holder(source.name, entry))
            _fetch_one(cold, source, entry)
            log.info("event=heal name=%s file=%s from=%s", source.name.partition(PARTIAL)[0], entry.path, cold.where())

    raise_first(ranks.gathered(fetch_mine))
    return sum(entry.size for entry in mine)


def _fetch_one(cold: RemoteTier, source: Source, entry: FileEntry) -> None:
    """Bring one file from the first copy that has it whole."""
    problems: list[CheckpointCorrupt | FileNotFoundError] = []
    for name in source.copies:
        try:
            with source.tier.arriving(store.holder(source.name, entry), entry, cold.where(name)) as sink:
                cold.fetch(name, entry, sink)
            return
        except (CheckpointCorrupt, FileNotFoundError) as error:
            problems.append(error)
    if isinstance(problem := problems[0], CheckpointCorrupt):
        raise problem
    raise CheckpointCorrupt(f"{problem}", problems=(f"{entry.path} is missing in {cold.where()}",)) from problem


def _copy(ranks: Ranks, source: Source, entry: FileEntry, giver: int, sinks: set[int]) -> None:
    """Bring a file to the folders that lack it, from a rank that has it."""
    with ExitStack() as arriving:
        sink = None
        if ranks.rank in sinks:
            holder = store.holder(source.name, entry)
            sink = arriving.enter_context(source.tier.arriving(holder, entry, f"rank {giver}"))
        ranks.copy_file(giver, source.locate(entry.path), sink)
        raise_first(ranks.gathered(arriving.close))
    if sink is not None:
        log.info("event=heal name=%s file=%s from_rank=%d", source.name.partition(PARTIAL)[0], entry.path, giver)


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
    opened: list[Source] = []
    raise_first(ranks.gathered(lambda: opened.append(_open(path))))
    (source,) = opened
    if source.manifest is None:
        return source
    try:
        return verify_together(ranks, place or Place.shared(ranks, source.tier), source.name, needs=needs)
    except CheckpointCorrupt as error:
        raise CheckpointCorrupt(error.message, problems=error.problems, hint=store.available(source.tier)) from error


def open_with_copies(ranks: Ranks, place: Place, name: str, needs: Needs | None = None) -> Source | None:
    """The save that a folder has under a name, made whole from the other folders and from its copies in the cold tier,
    whatever those are called; None where no folder knows which save that is.  Collective.

    Raises:
        CheckpointCorrupt: a file is damaged or missing everywhere.
        TierUnavailable, TierDenied: the cold tier does not answer.
    """
    _, told = _read_by_leaders(ranks, place, name)
    known = [one for one in told if isinstance(one, Manifest)]
    if not known:
        return None
    there = _what_is_cold(ranks, place)
    if isinstance(there, ResilienceError):
        raise there
    copies = {one: it for one, it in there.items() if isinstance(it, Manifest) and it.is_same_save(known[0])}
    return verify_together(ranks, place, name, save=known[0].save_id, copies=copies, needs=needs)


def _open(path: Path) -> Source:
    if path.is_dir() and store.is_stock_folder(path):
        return Source(LocalTier(path.parent), path.name)
    if path.is_dir() and not (path / MANIFEST).exists() and LocalTier(path).names():
        raise CheckpointNotFound(f"{str(path)!r} is a folder of checkpoints.", hint=store.available(LocalTier(path)))
    tier, name, manifest = store.open_checkpoint(path)
    return Source(tier, name, manifest)
