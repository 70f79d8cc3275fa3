"""One checkpoint, made whole: every byte is checked, and what a folder lacks is brought to it.

Ranks share the checking, each file by one rank of each folder, by size and digest; or the digests of shards are left
to be taken while they are read.  What a killed process left in the memory of a node is read there.  What a folder
lacks comes from memory, where folders are node-local from a node that has it, and otherwise from the cold tier.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning_resilience import memory, store
from lightning_resilience.errors import CheckpointCorrupt, CheckpointNotFound, CheckpointUncommitted
from lightning_resilience.manifest import META, METADATA, SHARD, FileEntry, Manifest
from lightning_resilience.memory import MemoryTier
from lightning_resilience.places import Needs, Origin, Place, Source
from lightning_resilience.ranks import Ranks, attempt, raise_first
from lightning_resilience.remote import RemoteTier
from lightning_resilience.tiers import LocalTier, final_name, partial_name

log = logging.getLogger("lightning_resilience")


def make_whole(
    ranks: Ranks,
    place: Place,
    name: str,
    *,
    save: str | None = None,
    copies: Mapping[str, Manifest] | None = None,
    needs: Needs | None = None,
    reading_checks: bool = False,
) -> Source:
    """Check a checkpoint, each file by one rank of each folder, and bring every folder what its ranks need, with the
    bytes of another folder or of the cold tier.  Collective.

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
        reading_checks: shard files that are there are only checked for their size, and left to be digested while they
            are read: ``Source.unchecked``.

    Raises:
        CheckpointCorrupt: a file is damaged or missing everywhere; on all ranks.
        CheckpointNotFound, CheckpointUncommitted, CheckpointIncompatible: there is no manifest to go by.
    """
    tier, leads = place.tier, ranks.rank == place.leader
    manifest = _manifest_of(ranks, place, name, save, copies or {})

    def spot_here() -> _Spot:
        spot = _spot(tier, name, manifest)
        return spot if spot.manifest != manifest else replace(spot, manifest=None)  # it grows with the ranks

    spots = ranks.gathered(lambda: spot_here() if leads else None)
    raise_first(spots)
    spot = spots[place.leader]
    assert isinstance(spot, _Spot)
    spot = replace(spot, manifest=spot.manifest or manifest)
    by_size = {entry.path for entry in manifest if reading_checks and entry.path.endswith(SHARD)}
    recalled, unchecked = _recall(ranks, place.memory, manifest, by_size)
    source = Source(tier, spot.work, spot.manifest, copies=tuple(copies or ()), in_memory=recalled[ranks.rank])
    found = _look(ranks, place, source, recalled, by_size)
    if (lost := found.lost) and not copies:
        raise CheckpointCorrupt(f"{name} is damaged: {'; '.join(lost.values())}.", problems=tuple(lost.values()))
    with ExitStack() as held:
        raise_first(ranks.gathered(lambda: spot.begin(tier, held) if leads else None))
        small = {METADATA, META}  # first, because ``needs`` goes by them
        fetched = _bring(ranks, place, source, found, small)
        mine = manifest.paths - small
        if needs is not None and not found.is_everywhere and len(place.sharing) < ranks.world_size:
            mine &= _needed(ranks, place, manifest, lambda: needs(source))
        fetched += _bring(ranks, place, source, found, mine)
        raise_first(ranks.gathered(lambda: spot.finish(tier) if leads else None))
    origin = found.origin(manifest, sum(ranks.all_gather(fetched)))
    source = replace(source, name=spot.name, origin=origin)
    unchecked |= {source.home(entry.path): entry for entry in manifest if entry.path in found.unchecked}
    return replace(source, unchecked=unchecked, is_checked=not by_size)


def read_by_leaders(
    ranks: Ranks, place: Place, name: str
) -> tuple[Manifest | BaseException | None, list[Manifest | BaseException | None]]:
    """The manifest of a checkpoint, or why there is none, as the first rank of each folder reads it (None on others):
    this rank's, and all of them without their files.  Collective."""
    mine = attempt(lambda: store.read_manifest(place.tier, name)) if ranks.rank == place.leader else None
    return mine, ranks.all_gather(mine.outline() if isinstance(mine, Manifest) else mine)


def _manifest_of(ranks: Ranks, place: Place, name: str, save: str | None, copies: Mapping[str, Manifest]) -> Manifest:
    """The manifest of a save, as the first folder has it under ``name``, or else the cold tier.
    It grows with the number of ranks, so it is told once, and only what tells saves apart is told by all."""
    mine, told = read_by_leaders(ranks, place, name)
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
    return _Spot(free, partial_name(free), alone)


def _recall(
    ranks: Ranks, tier: MemoryTier | None, manifest: Manifest, by_size: Collection[str]
) -> tuple[list[Mapping[str, Path]], dict[Path, FileEntry]]:
    """Where each rank finds files of a checkpoint, whole, in the memory of its node; read by one of its ranks each.
    And which of them, checked ``by_size`` alone, are this rank's to digest.  Collective."""
    nothing: list[Mapping[str, Path]] = [{}] * ranks.world_size
    if tier is None:
        return nothing, {}
    claims = tier.claims(manifest)
    everyone = ranks.all_gather((tier.node, frozenset(claims)))
    if not any(files for _, files in everyone):
        return nothing, {}
    neighbours = [rank for rank, (node, _) in enumerate(everyone) if node == tier.node]
    mine = {}
    for entry in manifest:
        able = [rank for rank in neighbours if entry.path in everyone[rank][1]]
        if able and able[entry.rank % len(able)] == ranks.rank:
            mine[entry.path] = memory.whole(entry, claims[entry.path], by_size=entry.path in by_size)
    checked = ranks.all_gather({file: path for file, path in mine.items() if path is not None})
    of_nodes: dict[tuple[object, ...], dict[str, Path]] = {}
    for (node, _), files in zip(everyone, checked, strict=True):
        of_nodes.setdefault(node, {}).update(files)
    unchecked = {path: entry for entry in manifest if entry.path in by_size and (path := mine.get(entry.path))}
    return [of_nodes[node] for node, _ in everyone], unchecked


@dataclass(frozen=True)
class _Some:
    """Some of many files as ranks tell each other of them: by their numbers, or by those of the others where these are
    fewer.  A node's folder has its own ranks' files, or nearly all, so the numbers that all nodes tell are about as
    many as there are files, and not for each node as many."""

    numbers: tuple[int, ...]
    are_the_others: bool

    @classmethod
    def of(cls, chosen: set[int], among: Sequence[int]) -> _Some:
        """``chosen`` out of ``among``."""
        others = [number for number in among if number not in chosen]
        if len(others) < len(chosen):
            return cls(tuple(others), True)
        return cls(tuple(chosen), False)

    def out_of(self, among: Sequence[int]) -> Iterable[int]:
        """Which of ``among`` they are."""
        return set(among).difference(self.numbers) if self.are_the_others else self.numbers


def _needed(ranks: Ranks, place: Place, manifest: Manifest, needs: Callable[[], set[str]]) -> set[str]:
    """Names of the files that the ranks of this folder read.  Collective."""
    every = range(len(manifest.files))

    def ask() -> _Some:
        names = needs()
        return _Some.of({number for number in every if manifest.files[number].path in names}, every)

    told: list[Any] = ranks.gathered(ask)
    raise_first(told)
    return {manifest.files[number].path for rank in place.sharing for number in told[rank].out_of(every)}


@dataclass
class _Found:
    """Where the files of a checkpoint are: of each, a rank ``holding`` it whole, in its folder or in memory; those that
    this rank's folder is ``lacking``, those that nobody has (``lost``), and why not; whether each folder has them all;
    which are read ``in_memory``, which in a folder; and those in its folder that this rank has yet to digest."""

    holding: dict[str, int] = field(default_factory=dict)
    lacking: set[str] = field(default_factory=set)
    lost: dict[str, str] = field(default_factory=dict)
    is_everywhere: bool = True
    in_memory: set[str] = field(default_factory=set)
    in_folders: set[str] = field(default_factory=set)
    unchecked: set[str] = field(default_factory=set)

    def origin(self, manifest: Manifest, fetched: int) -> Origin:
        """Where the files are read, once some bytes of them are ``fetched`` from the cold tier."""
        shards = [entry for entry in manifest if entry.path.endswith(SHARD)]
        writers = {entry.rank for entry in shards}
        elsewhere = {entry.rank for entry in shards if entry.path not in self.in_memory - self.in_folders}
        return Origin((len(writers - elsewhere), len(writers)), bool(self.in_folders), fetched)


@dataclass(frozen=True)
class _Checked:
    """What a rank tells of its share of the files: which ones its folder has whole (``leader`` is the first of those
    that share it), and what is wrong with others that are there."""

    leader: int
    whole: _Some
    damaged: dict[str, str]


def _look(
    ranks: Ranks,
    place: Place,
    source: Source,
    recalled: Sequence[Mapping[str, Path]],
    by_size: Collection[str] = (),
) -> _Found:
    """Check the files of a checkpoint in every folder, shared out over the ranks that share it, some ``by_size`` alone.
    Collective.

    What all of them read in memory is not read in the folder, which must have it all the same: memory goes.
    """
    assert source.manifest is not None
    files, leader = source.manifest.files, place.leader

    def is_recalled(file: str, sharing: Sequence[int]) -> bool:
        return all(file in recalled[rank] for rank in sharing)

    def problem_of(entry: FileEntry) -> str | None:
        if is_recalled(entry.path, place.sharing):
            return None if place.passing else store.size_problem(source.tier, source.name, entry)
        check = store.size_problem if entry.path in by_size else store.content_problem
        return check(source.tier, source.name, entry)

    def check() -> _Checked:
        mine = _shared_out(files, place.sharing)[ranks.rank]
        problems = {number: problem for number in mine if (problem := problem_of(files[number])) is not None}
        damaged = {files[number].path: why for number, why in problems.items() if why != store.missing(files[number])}
        return _Checked(leader, _Some.of(set(mine).difference(problems), mine), damaged)

    told: list[Any] = ranks.gathered(check)
    raise_first(told)
    folders: dict[int, list[int]] = {}
    for rank, checked in enumerate(told):
        folders.setdefault(checked.leader, []).append(rank)
    found, damaged = _Found(), dict[str, str]()
    for rank, paths in enumerate(recalled):
        for file in paths:
            found.holding.setdefault(file, rank)
            found.in_memory.add(file)
    for folder, sharing in folders.items():
        whole: set[str] = set()
        for rank, share in _shared_out(files, sharing).items():
            of_rank = {files[number].path for number in told[rank].whole.out_of(share)}
            whole |= of_rank
            damaged |= told[rank].damaged
            if rank == ranks.rank:
                found.unchecked = {file for file in of_rank.intersection(by_size) if not is_recalled(file, sharing)}
        for file in whole:
            found.holding.setdefault(file, folder)
            if not is_recalled(file, sharing):
                found.in_folders.add(file)
        if folder == leader:
            found.lacking = source.manifest.paths - whole
        found.is_everywhere &= len(whole) == len(files)
    nobody = [entry for entry in files if entry.path not in found.holding]
    found.lost = {entry.path: damaged.get(entry.path, store.missing(entry)) for entry in nobody}
    return found


def _shared_out(files: Sequence[FileEntry], sharing: Sequence[int]) -> dict[int, list[int]]:
    """The numbers of the files that each of the ranks which share a folder checks: those that it reads itself, as long
    as the ranks are those that wrote them."""
    shares: dict[int, list[int]] = {rank: [] for rank in sharing}
    for number, entry in enumerate(files):
        shares[sharing[entry.rank % len(sharing)]].append(number)
    return shares


def _bring(ranks: Ranks, place: Place, source: Source, found: _Found, files: Collection[str]) -> int:
    """Bring this rank's folder those of ``files`` that it lacks.  Collective, with other files in each folder.

    Returns:
        Bytes that this rank fetched from the cold tier.
    """
    assert source.manifest is not None
    leader, lost = place.leader, found.lost
    lacking = found.lacking.intersection(files)
    wanted = [entry for entry in source.manifest if entry.path in lacking]
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
            log.info("event=heal name=%s file=%s from=%s", final_name(source.name), entry.path, cold.where())

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
        log.info("event=heal name=%s file=%s from_rank=%d", final_name(source.name), entry.path, giver)
