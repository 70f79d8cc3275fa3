"""One checkpoint, made whole: its files are checked (see ``inspection``), and what a folder lacks is brought to it.

Files are checked by size and digest; or the digests of shards are left to be taken while they are read.  What a killed
process left in the memory of a node is read there.  What a folder lacks comes from memory, where folders are node-local
from a node that has it, and otherwise from the cold tier.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from lightning_resilience import store
from lightning_resilience.errors import CheckpointCorrupt, CheckpointNotFound, CheckpointUncommitted
from lightning_resilience.inspection import Found, look, needed, recall
from lightning_resilience.manifest import META, METADATA, SHARD, FileEntry, Manifest
from lightning_resilience.places import Needs, Place, Source
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
    recalled, unchecked = recall(ranks, place.memory, manifest, by_size)
    source = Source(tier, spot.work, spot.manifest, copies=tuple(copies or ()), in_memory=recalled[ranks.rank])
    found = look(ranks, place, source, recalled, by_size)
    if (lost := found.lost) and not copies:
        raise CheckpointCorrupt(f"{name} is damaged: {'; '.join(lost.values())}.", problems=tuple(lost.values()))
    with ExitStack() as held:
        raise_first(ranks.gathered(lambda: spot.begin(tier, held) if leads else None))
        small = {METADATA, META}  # first, because ``needs`` goes by them
        fetched = _bring(ranks, place, source, found, small)
        mine = manifest.paths - small
        if needs is not None and not found.is_everywhere and len(place.sharing) < ranks.world_size:
            mine &= needed(ranks, place, manifest, lambda: needs(source))
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


def _bring(ranks: Ranks, place: Place, source: Source, found: Found, files: Collection[str]) -> int:
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
