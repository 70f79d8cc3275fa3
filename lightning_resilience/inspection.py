"""Where the files of one checkpoint are, and which of them are whole, as all ranks together find out.

Each file is looked at by one rank of each folder, and in the memory of each node by one of its ranks.  What ranks tell
each other grows with the number of files, and not with files times nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_resilience import memory, store
from lightning_resilience.manifest import SHARD, FileEntry, Manifest
from lightning_resilience.memory import MemoryTier
from lightning_resilience.places import Origin, Place, Source
from lightning_resilience.ranks import Ranks, raise_first


@dataclass
class Found:
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
class Some:
    """Some of many files as ranks tell each other of them: by their numbers, or by those of the others where these are
    fewer.  A node's folder has its own ranks' files, or nearly all, so the numbers that all nodes tell are about as
    many as there are files, and not for each node as many."""

    numbers: tuple[int, ...]
    are_the_others: bool

    @classmethod
    def of(cls, chosen: set[int], among: Sequence[int]) -> Some:
        """``chosen`` out of ``among``."""
        others = [number for number in among if number not in chosen]
        if len(others) < len(chosen):
            return cls(tuple(others), True)
        return cls(tuple(chosen), False)

    def out_of(self, among: Sequence[int]) -> Iterable[int]:
        """Which of ``among`` they are."""
        return set(among).difference(self.numbers) if self.are_the_others else self.numbers


@dataclass(frozen=True)
class Checked:
    """What a rank tells of its share of the files: which ones its folder has whole (``leader`` is the first of those
    that share it), and what is wrong with others that are there."""

    leader: int
    whole: Some
    damaged: dict[str, str]


def recall(
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


def look(
    ranks: Ranks,
    place: Place,
    source: Source,
    recalled: Sequence[Mapping[str, Path]],
    by_size: Collection[str] = (),
) -> Found:
    """Check the files of a checkpoint in every folder, shared out over the ranks that share it, some ``by_size`` alone.
    Collective.

    What all of them read in memory is not read in the folder, which must have it all the same: memory goes.
    """
    assert source.manifest is not None
    files = source.manifest.files

    def problem_of(entry: FileEntry) -> str | None:
        if _by_all(recalled, place.sharing, entry.path):
            return None if place.passing else store.size_problem(source.tier, source.name, entry)
        check = store.size_problem if entry.path in by_size else store.content_problem
        return check(source.tier, source.name, entry)

    def check() -> Checked:
        mine = _shared_out(files, place.sharing)[ranks.rank]
        problems = {number: problem for number in mine if (problem := problem_of(files[number])) is not None}
        damaged = {files[number].path: why for number, why in problems.items() if why != store.missing(files[number])}
        return Checked(place.leader, Some.of(set(mine).difference(problems), mine), damaged)

    told: list[Any] = ranks.gathered(check)
    raise_first(told)
    return put_together(files, told, recalled, ranks.rank, by_size)


def put_together(
    files: Sequence[FileEntry],
    told: Sequence[Checked],
    recalled: Sequence[Mapping[str, Path]],
    rank: int,
    by_size: Collection[str] = (),
) -> Found:
    """What follows, for one rank, from what all have told of their shares."""
    folders: dict[int, list[int]] = {}
    for number, checked in enumerate(told):
        folders.setdefault(checked.leader, []).append(number)
    found, damaged = Found(), dict[str, str]()
    for holder, paths in enumerate(recalled):
        for file in paths:
            found.holding.setdefault(file, holder)
            found.in_memory.add(file)
    for leader, sharing in folders.items():
        whole: set[str] = set()
        for of_rank, share in _shared_out(files, sharing).items():
            its_own = {files[number].path for number in told[of_rank].whole.out_of(share)}
            whole |= its_own
            damaged |= told[of_rank].damaged
            if of_rank == rank:
                found.unchecked = {
                    file for file in its_own.intersection(by_size) if not _by_all(recalled, sharing, file)
                }
        for file in whole:
            found.holding.setdefault(file, leader)
            if not _by_all(recalled, sharing, file):
                found.in_folders.add(file)
        if leader == told[rank].leader:
            found.lacking = {entry.path for entry in files} - whole
        found.is_everywhere &= len(whole) == len(files)
    nobody = [entry for entry in files if entry.path not in found.holding]
    found.lost = {entry.path: damaged.get(entry.path, store.missing(entry)) for entry in nobody}
    return found


def _by_all(recalled: Sequence[Mapping[str, Path]], sharing: Sequence[int], file: str) -> bool:
    """Whether all that share a folder read a file in memory."""
    return all(file in recalled[rank] for rank in sharing)


def _shared_out(files: Sequence[FileEntry], sharing: Sequence[int]) -> dict[int, list[int]]:
    """The numbers of the files that each of the ranks which share a folder checks: those that it reads itself, as long
    as the ranks are those that wrote them."""
    shares: dict[int, list[int]] = {rank: [] for rank in sharing}
    for number, entry in enumerate(files):
        shares[sharing[entry.rank % len(sharing)]].append(number)
    return shares


def needed(ranks: Ranks, place: Place, manifest: Manifest, needs: Callable[[], set[str]]) -> set[str]:
    """Names of the files that the ranks of this folder read.  Collective."""
    every = range(len(manifest.files))

    def ask() -> Some:
        names = needs()
        return Some.of({number for number in every if manifest.files[number].path in names}, every)

    told: list[Any] = ranks.gathered(ask)
    raise_first(told)
    return {manifest.files[number].path for rank in place.sharing for number in told[rank].out_of(every)}
