"""Checkpoints in a tier: list, verify, commit, forget, sweep.  Knows manifests; knows no tensors, ranks or trainers.

Everything here goes by one rule: a checkpoint exists if and only if its manifest does and every file it names is there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from lightning_resilience import points
from lightning_resilience.errors import (
    CheckpointCorrupt,
    CheckpointNotFound,
    CheckpointUncommitted,
    ResilienceError,
    TierDenied,
    TierUnavailable,
)
from lightning_resilience.manifest import (
    EXTENSION,
    MANIFEST,
    META,
    METADATA,
    PARTIAL,
    PINNED,
    REMOVED,
    FileEntry,
    Manifest,
    newest_first,
)
from lightning_resilience.retention import Judgement, Keep, Ranking, judge
from lightning_resilience.tiers import LocalTier, RestatableTier, Tier, WritableTier, final_name

log = logging.getLogger("lightning_resilience")


@dataclass
class Listing:
    """What a tier holds: ``committed`` manifests by name, and for each folder without a good one, why."""

    committed: dict[str, Manifest] = field(default_factory=dict)
    unusable: dict[str, ResilienceError] = field(default_factory=dict)

    @property
    def uncommitted(self) -> set[str]:
        """Names of the folders without a manifest."""
        return {name for name, why in self.unusable.items() if isinstance(why, CheckpointUncommitted)}

    @property
    def damaged(self) -> dict[str, ResilienceError]:
        """The names under which there is a manifest that cannot be used, and why not."""
        return {name: why for name, why in self.unusable.items() if not isinstance(why, CheckpointUncommitted)}

    def newest_first(self) -> list[str]:
        """Names of the committed ones, newest first."""
        return newest_first(self.committed)


def list_checkpoints(tier: Tier, *, in_part: bool = False, but: Collection[str] = ()) -> Listing:
    """Read the manifests of a tier, as they are on disk now.

    Args:
        tier: where.
        in_part: whether what cannot be read now is ``unusable``, as is good enough to show people what there is; what
            decides by the list must not take an outage for an answer.
        but: names that are not looked at.

    Raises:
        TierUnavailable, TierDenied: the tier cannot be listed, or not ``in_part`` and a manifest cannot be read.
    """
    listing = Listing()
    names = [name for name in tier.names() if name not in but]
    for name, found in zip(names, _read_manifests(tier, names), strict=True):
        if isinstance(found, Manifest):
            listing.committed[name] = found
        elif isinstance(found, (TierUnavailable, TierDenied)) and not in_part:
            raise found
        elif not isinstance(found, CheckpointNotFound):  # removed between the listing and the reading
            listing.unusable[name] = found
    for name in tier.leftovers():
        doing = "saved" if PARTIAL in name else "removed"
        listing.unusable[name] = CheckpointUncommitted(f"{name} was still being {doing}.")
    return listing


def _read_manifests(tier: Tier, names: list[str]) -> Iterable[Manifest | ResilienceError]:
    """The manifests of checkpoints, or why not, as many at once as the tier is good for."""

    def read(name: str) -> Manifest | ResilienceError:
        try:
            return read_manifest(tier, name)
        except ResilienceError as error:
            return error

    if tier.READERS == 1 or len(names) < 2:
        return map(read, names)
    with ThreadPoolExecutor(min(tier.READERS, len(names)), "list") as pool:
        return list(pool.map(read, names))


def read_manifest(tier: Tier, name: str) -> Manifest:
    """The manifest of one checkpoint.

    Raises:
        CheckpointNotFound: there is no folder of that name.
        CheckpointUncommitted: the folder has no manifest.
        CheckpointCorrupt, CheckpointIncompatible: the manifest cannot be used.
    """
    where = tier.where(name, MANIFEST)
    try:
        return Manifest.from_bytes(tier.read(name, MANIFEST), where)
    except (FileNotFoundError, NotADirectoryError):
        if not tier.exists(name):
            raise CheckpointNotFound(f"There is no checkpoint {tier.where(name)!r}.") from None
        raise CheckpointUncommitted(
            f"{tier.where(name)!r} has no {MANIFEST}: its save did not finish.",
            hint="Resume with ckpt_path='last', which skips it.",
        ) from None
    except OSError as error:
        if isinstance(error, ResilienceError):
            raise
        raise CheckpointCorrupt(
            f"{where} cannot be read: {error.strerror}.", problems=(f"{MANIFEST}: {error}",)
        ) from error


def open_checkpoint(path: Path) -> tuple[LocalTier, str, Manifest]:
    """The checkpoint at an explicit path; see ``read_manifest`` for the errors, which list what is there instead."""
    path = path.absolute()
    if path.is_symlink():
        path = path.resolve()
    tier, name = LocalTier(path.parent), path.name
    if PARTIAL in name or REMOVED in name:
        raise CheckpointUncommitted(f"{str(path)!r} is not committed.", hint=available(tier))
    try:
        return tier, name, read_manifest(tier, name)
    except (CheckpointNotFound, CheckpointUncommitted) as error:
        raise type(error)(error.message, hint=available(tier)) from None


def available(tier: Tier) -> str:
    """A sentence that names the checkpoints in a tier, newest first."""
    names = list_checkpoints(tier, in_part=True).newest_first()
    if not names:
        return f"There are no checkpoints in {tier.where()!r}."
    shown = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
    return f"{tier.where()!r} has: {shown}."


def is_stock_folder(path: Path) -> bool:
    """Whether a folder is a sharded checkpoint of stock Lightning (and not one of ours without its manifest)."""
    return (
        (path / METADATA).is_file()
        and (path / META).is_file()
        and not (path / MANIFEST).exists()
        and not any(path.glob("rank_*.pt"))
    )


def newest_stock(tier: LocalTier) -> str | None:
    """What a stock ModelCheckpoint left in the folder to go on from: its newest ``last.ckpt``, or else the newest."""
    found = [
        path
        for path in tier.root.glob(f"*{EXTENSION}")
        if path.is_file() or (path.is_dir() and is_stock_folder(path.resolve()))
    ]
    last = [path for path in found if path.name.startswith("last")]
    return str(max(last or found, key=lambda path: path.stat().st_mtime, default="")) or None


# -- verifying --------------------------------------------------------------------------------------------------------


def holder(name: str, entry: FileEntry) -> str:
    """Name of the checkpoint that holds the bytes of ``entry`` of checkpoint ``name``."""
    return entry.at or name


def missing(entry: FileEntry) -> str:
    """What is said of a file that is not there."""
    return f"{entry.path} is missing"


def size_problem(tier: Tier, name: str, entry: FileEntry) -> str | None:
    """Why a file cannot be whole, judged by its size alone; None where it can."""
    try:
        size = tier.size(holder(name, entry), entry.path)
    except OSError as error:
        return unreadable(entry, error)
    if size is None:
        return missing(entry)
    if size != entry.size:
        how = "truncated" if size < entry.size else "longer"
        return f"{entry.path} is {how}: {size:,} bytes of {entry.size:,}"
    return None


def content_problem(tier: Tier, name: str, entry: FileEntry) -> str | None:
    """Why a file is not what the manifest says, by size and digest; None where it is."""
    if problem := size_problem(tier, name, entry):
        return problem
    try:
        found = tier.digest(holder(name, entry), entry.path)
    except OSError as error:
        return unreadable(entry, error)
    return digest_problem(entry, found)


def digest_problem(entry: FileEntry, found: str) -> str | None:
    """What is wrong with a file whose content has the digest ``found``, if anything."""
    return None if found == entry.xxh3_128 else f"{entry.path} has other content than was saved (digest differs)"


def unreadable(entry: FileEntry, error: OSError) -> str:
    """What is wrong with a file that cannot be read."""
    return f"{entry.path} cannot be read: {error.strerror}"


def verify(tier: Tier, name: str, manifest: Manifest, *, content: bool = True) -> list[str]:
    """All problems of a checkpoint, one ``file cause`` each; empty where it is whole."""
    check = content_problem if content else size_problem
    return [problem for entry in manifest if (problem := check(tier, name, entry))]


# -- writing ----------------------------------------------------------------------------------------------------------


def free_name(name: str, is_taken: Callable[[str], bool]) -> str:
    """``name``, or the first of ``name-v1``, ``name-v2``, … that is not taken."""
    stem = name.removesuffix(EXTENSION)
    candidate, version = name, 0
    while is_taken(candidate):
        version += 1
        candidate = f"{stem}-v{version}{EXTENSION}"
    return candidate


def commit(tier: WritableTier, partial: str, name: str, manifest: Manifest | bytes, *, replace: bool = False) -> None:
    """Turn the folder ``partial``, whose files are durable, into checkpoint ``name``: manifest (or its content, as
    another folder has it) last, one rename.

    Raises:
        TierUnavailable: behind a URL, a file is not there.
    """
    points.reach("commit.begin")
    if isinstance(manifest, bytes):
        tier.put_manifest(partial, manifest)
    else:
        tier.seal(partial, manifest)
    points.reach("commit.manifest")
    tier.publish(partial, name, replace=replace)
    points.reach("commit.end")


def restate(tier: RestatableTier, name: str, manifest: Manifest) -> None:
    """Say something else of a checkpoint than its manifest did (labels, health).

    Raises:
        CheckpointNotFound: it was removed meanwhile, and has not come back.
    """
    try:
        tier.put_manifest(name, manifest.to_bytes())
    except FileNotFoundError as error:
        raise CheckpointNotFound(f"{tier.where(name)!r} was removed just now.") from error
    if all(tier.size(name, entry.path) is None for entry in manifest if entry.at is None):
        tier.remove(name)
        raise CheckpointNotFound(f"{tier.where(name)!r} was removed just now.")


def suspect(tier: RestatableTier, name: str, manifest: Manifest) -> Manifest | None:
    """Call a save suspect, as ``manifest`` does, whatever else was said of it meanwhile; None where it is not there
    any more."""
    try:
        there = read_manifest(tier, name)
        if not there.is_same_save(manifest):
            return None
        told = there.suspected(manifest.extra["suspicion"])
        restate(tier, name, told)
        return told
    except CheckpointNotFound:
        return None


def is_pinned(tier: Tier, name: str) -> bool:
    """Whether there is a checkpoint of that name that no rule may remove."""
    try:
        return PINNED in read_manifest(tier, name).labels
    except ResilienceError:
        return False


def retain(
    tier: WritableTier,
    keep: Keep,
    ranking: Ranking | None = None,
    in_use: Collection[str] = (),
    *,
    run: str | None = None,
    up_to: int | None = None,
    committed: Mapping[str, Manifest] | None = None,
) -> list[Judgement]:
    """Judge a tier and remove what its rule gives up.

    Args:
        tier: where.
        keep: its rule.
        ranking: what ``keep.top_k`` ranks by.
        in_use: names that stay whatever the rule says.
        run: the run whose checkpoints are judged, where others' are none of the rule's business; all of them if None.
        committed: what is there, where that is known already; otherwise the tier is listed.
        up_to: sequence number of the newest checkpoint that users know of; newer ones do not make others redundant yet.

    Returns:
        The judgements on what was removed.  A removal that fails is logged and tried again after the next save.  So is,
        without a word, that of a checkpoint that a living process holds.
    """
    committed = list_checkpoints(tier).committed if committed is None else committed
    referred = {entry.at for manifest in committed.values() for entry in manifest if entry.at}
    removed = []
    known = {
        name: manifest
        for name, manifest in committed.items()
        if run in (None, manifest.run) and (up_to is None or manifest.sequence <= up_to)
    }
    for judgement in judge(known, keep, ranking, {*in_use, *referred}):
        if judgement.keep:
            continue
        try:
            if forget(tier, judgement) is None:
                removed.append(judgement)
        except (OSError, ResilienceError) as error:
            log.warning("event=forget name=%s error=%r", judgement.name, error)
    return removed


def forget(tier: WritableTier, judgement: Judgement) -> str | None:
    """Remove what a rule gives up; why it stays after all, or None.

    Raises:
        OSError, ResilienceError: it cannot be removed.
    """
    if PINNED in read_manifest(tier, judgement.name).labels:
        return "it was pinned just now"  # since it was listed
    if tier.is_held(judgement.name):
        return "a process is using it"  # it is on its way to another node, or its files are on their way here
    tier.remove(judgement.name)
    log.info("event=forget name=%s from=%s reason=%r", judgement.name, tier.where(), "; ".join(judgement.reasons))
    return None


def sweep(tier: WritableTier) -> list[str]:
    """Finish what a killed process left: a whole save that lacked only its rename is published, the rest deleted.

    What a living process is writing is left alone.

    Returns:
        What was done, one sentence each.
    """
    done = []
    for leftover in tier.leftovers():
        if tier.is_held(leftover):
            continue
        name = final_name(leftover)
        if PARTIAL in leftover and REMOVED not in leftover and not tier.exists(name) and _is_whole(tier, leftover):
            tier.publish(leftover, name)
            done.append(f"published {name}: it was whole but for its rename")
        else:
            tier.discard(leftover)
            done.append(
                f"deleted {leftover}: its {'removal had begun' if REMOVED in leftover else 'save never finished'}"
            )
    if isinstance(tier, LocalTier) and (count := tier.sweep_fetched()):
        done.append(f"deleted {count} files that were being fetched")
    return done


def _is_whole(tier: Tier, name: str) -> bool:
    try:
        return not verify(tier, name, read_manifest(tier, name))
    except ResilienceError:
        return False
