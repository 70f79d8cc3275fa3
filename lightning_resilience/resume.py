"""A resume: which checkpoint, decided by all ranks together.

Every rank looks at what it can see, the findings are gathered, and all come to the same answer: the newest checkpoint
of which every file is somewhere, whole, by size and digest.  Nothing is unpickled before that.  Where folders are
node-local, files that a node lacks are then copied to it from one that has them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from lightning_resilience import store
from lightning_resilience.engine import Engine, Folder
from lightning_resilience.errors import CheckpointCorrupt, CheckpointNotFound, ResilienceError
from lightning_resilience.manifest import HEALTHY, MANIFEST, WEIGHTS_ONLY, FileEntry, Manifest
from lightning_resilience.ranks import Ranks, raise_first
from lightning_resilience.tiers import LocalTier

log = logging.getLogger("lightning_resilience")


@dataclass(frozen=True)
class Source:
    """A checkpoint that every rank can read: verified if it has a manifest; without one it is stock Lightning's."""

    tier: LocalTier
    name: str
    manifest: Manifest | None = None

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


def find_last(engine: Engine, folders: Sequence[Folder]) -> Search:
    """The newest healthy checkpoint in ``folders`` that all ranks together can restore.  Collective."""
    search = Search()
    first = engine.ranks.rank == 0
    candidates: list[tuple[tuple[int, int], int, str]] = []
    for index, folder in enumerate(folders):
        listings = engine.ranks.gathered(lambda folder=folder: _what_is_there(folder.tier))  # type: ignore[misc]
        raise_first(listings)
        found: dict[str, tuple[int, int] | str | ResilienceError] = {}
        for listing in reversed(listings):
            assert isinstance(listing, dict)
            found |= {name: what for name, what in listing.items() if not isinstance(found.get(name), tuple)}
            found |= {name: what for name, what in listing.items() if isinstance(what, tuple)}
        for name, what in found.items():
            if isinstance(what, tuple):
                candidates.append((what, index, name))
            else:
                search.skip(folder.tier.path(name), what, aloud=first)
    for _, index, name in sorted(candidates, reverse=True):
        folder = folders[index]
        try:
            search.source = verify_together(engine.ranks, folder, name)
            return search
        except ResilienceError as error:
            search.skip(folder.tier.path(name), error, aloud=first)
    return search


def _what_is_there(tier: LocalTier) -> dict[str, tuple[int, int] | str | ResilienceError]:
    """Place in the order of each checkpoint that a run may resume from, or why it may not: its nature, or damage."""
    listing = store.list_checkpoints(tier)
    found: dict[str, tuple[int, int] | str | ResilienceError] = {
        name: error
        for name, error in listing.unusable.items()
        if name in tier.names() and not store.is_stock_folder(tier.path(name))
    }
    for name, manifest in listing.committed.items():
        if WEIGHTS_ONLY in manifest.labels:
            found[name] = "it holds weights only"
        elif manifest.health != HEALTHY:
            found[name] = f"it is {manifest.health}"
        else:
            found[name] = manifest.order
    return found


def verify_together(ranks: Ranks, folder: Folder, name: str) -> Source:
    """Check every byte of a checkpoint, each file by one rank of each folder, and make it whole on every folder.
    Collective.

    Raises:
        CheckpointCorrupt: a file is damaged or missing everywhere; on all ranks.
        CheckpointNotFound, CheckpointUncommitted, CheckpointIncompatible: there is no manifest to go by.
    """
    tier = folder.tier
    manifests = ranks.gathered(lambda: store.read_manifest(tier, name))
    good = [manifest for manifest in manifests if isinstance(manifest, Manifest)]
    if not good:
        raise_first(manifests)
    manifest = good[0]
    mine = manifest.files[folder.sharing.index(ranks.rank) :: len(folder.sharing)]
    checked = ranks.gathered(lambda: {entry.path: store.content_problem(tier, name, entry) for entry in mine})
    raise_first(checked)

    problems: dict[str, str] = {}
    lacking: dict[str, set[int]] = {}
    holding: dict[str, int] = {}
    leader_of = dict(enumerate(ranks.all_gather(folder.sharing[0])))
    for rank, findings in enumerate(checked):
        assert isinstance(findings, dict)
        for file, problem in findings.items():
            if problem is None:
                holding.setdefault(file, leader_of[rank])
            else:
                lacking.setdefault(file, set()).add(leader_of[rank])
                problems[file] = problem
    lost = [problem for file, problem in problems.items() if file not in holding]
    if lost:
        raise CheckpointCorrupt(f"{name} is damaged: {'; '.join(lost)}.", problems=tuple(lost))
    for file in sorted(lacking):
        _copy(ranks, folder, name, manifest.file(file), holding[file], lacking[file])
    if len(good) < ranks.world_size and ranks.rank == folder.sharing[0]:
        _write_missing_manifest(tier, name, manifest)
    return Source(tier, name, manifest)


def _copy(ranks: Ranks, folder: Folder, name: str, entry: FileEntry | None, source: int, sinks: set[int]) -> None:
    """Bring a file to the folders that lack it, from the leader of one that has it."""
    assert entry is not None
    tier, holder = folder.tier, store.holder(name, entry)
    target = tier.path(holder, entry.path)
    sink = None
    if ranks.rank in sinks:
        target.parent.mkdir(parents=True, exist_ok=True)
        sink = target.with_name(f".{entry.path}.fetched-{os.getpid()}")
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


def _write_missing_manifest(tier: LocalTier, name: str, manifest: Manifest) -> None:
    with suppress(FileExistsError):
        tier.write(name, MANIFEST, manifest.to_bytes())
        tier.sync(name)


def open_explicit(ranks: Ranks, path: Path, folder: Folder | None = None) -> Source:
    """The checkpoint at a path that the user named.  Collective.

    Args:
        ranks: who opens it.
        path: where it is on this rank.
        folder: the folder it is in, where it is known who shares that; otherwise all ranks are taken to.

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
    everyone = tuple(range(ranks.world_size))
    try:
        return verify_together(ranks, folder or Folder(source.tier, everyone, (0,)), source.name)
    except CheckpointCorrupt as error:
        raise CheckpointCorrupt(error.message, problems=error.problems, hint=store.available(source.tier)) from error


def _open(path: Path) -> Source:
    if path.is_dir() and store.is_stock_folder(path):
        return Source(LocalTier(path.parent), path.name)
    if path.is_dir() and not (path / MANIFEST).exists() and LocalTier(path).names():
        raise CheckpointNotFound(f"{str(path)!r} is a folder of checkpoints.", hint=store.available(LocalTier(path)))
    tier, name, manifest = store.open_checkpoint(path)
    return Source(tier, name, manifest)
