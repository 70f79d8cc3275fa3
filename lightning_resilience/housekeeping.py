"""What the command line changes: copies between a folder and a cold tier, removals, labels.  No torch.

Each copy is made as a save is: files first, each checked on its way, the manifest last.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_resilience import scratch, store
from lightning_resilience.errors import (
    CheckpointCorrupt,
    CheckpointNotFound,
    ResilienceError,
    SetupError,
    TierUnavailable,
)
from lightning_resilience.manifest import (
    EXTENSION,
    MANIFEST,
    PINNED,
    FileEntry,
    Manifest,
    newest_first,
)
from lightning_resilience.remote import RemoteTier
from lightning_resilience.retention import Judgement, Keep, Ranking, judge_runs
from lightning_resilience.scratch import Scratch
from lightning_resilience.tiers import LocalTier, Tier, WritableTier, partial_name

COPIES = 4
"""Files that are copied at once."""

Told = Callable[[int, str], None]
"""Hears of bytes that are done, and of which checkpoint."""


def open_url(url: str, storage_options: Mapping[str, Any] | None) -> tuple[RemoteTier, str | None]:
    """The tier behind a URL, and the checkpoint's name where it is the URL of one."""
    root, _, last = url.rstrip("/").rpartition("/")
    if last.endswith(EXTENSION) and "://" in root:
        return RemoteTier(root, storage_options), last
    return RemoteTier(url, storage_options), None


def choose(committed: Mapping[str, Manifest], step: int | None, where: str) -> str:
    """The checkpoint of a step, or else the newest that a run can resume from.

    Raises:
        CheckpointNotFound: there is none.
    """
    steps = ", ".join(str(committed[name].step) for name in newest_first(committed)) or "none"
    for name in newest_first(committed):
        manifest = committed[name]
        if manifest.step == step or (step is None and manifest.unresumable is None):
            return name
    wanted = "to resume from" if step is None else f"of step {step}"
    raise CheckpointNotFound(f"There is no checkpoint {wanted} in {where!r}.", hint=f"Steps that are there: {steps}.")


def pull(source: RemoteTier, name: str, manifest: Manifest, target: LocalTier, tell: Told) -> int:
    """Copy a checkpoint from a cold tier to a folder; the bytes that had to be fetched.

    Raises:
        CheckpointCorrupt: a file is not what the manifest says.
        SetupError: another checkpoint of that name is in the folder.
    """
    if target.exists(name):
        _refuse_another(target, name, manifest)
        if not store.verify(target, name, manifest):
            return 0
        raise SetupError(f"{target.where(name)!r} is there, and damaged.", hint="Move it away, then pull again.")
    target.check_writable()
    partial = partial_name(name)
    target.begin(partial)
    with target.hold(partial):
        try:

            def fetch(entry: FileEntry) -> None:
                holder = store.holder(name, entry)
                with target.arriving(partial, entry, source.where(holder)) as sink:
                    source.fetch(holder, entry, sink)

            _each(fetch, name, manifest, tell)
            store.commit(target, partial, name, manifest.standing_alone())
        except BaseException:
            target.discard(partial)
            raise
    return manifest.size


@contextmanager
def fetched(source: RemoteTier, name: str, manifest: Manifest, tell: Told) -> Iterator[LocalTier]:
    """A folder with a copy of a checkpoint from a cold tier, every byte checked, for as long as the block runs.

    Raises:
        CheckpointCorrupt: a file is not what the manifest says.
        TierUnavailable: there is no room for it.
    """
    temporary = Path(tempfile.gettempdir())
    scratch.sweep(temporary)
    folder = Scratch(temporary, f"fetched-{uuid.uuid4().hex[:12]}")
    try:
        tier = LocalTier(folder.path)
        try:
            pull(source, name, manifest, tier, tell)
        except OSError as error:
            if isinstance(error, ResilienceError):
                raise
            raise TierUnavailable(
                f"{source.where(name)!r} cannot be fetched to {str(temporary)!r}: {error.strerror or error}.",
                hint=f"Set TMPDIR to a folder with {manifest.size:,} bytes to spare.",
            ) from error
        yield tier
    finally:
        folder.close()


def check_target(file: Path, *, force: bool) -> None:
    """Make sure that a file can be written.

    Raises:
        SetupError: there is something already, or no folder for it.
    """
    if file.is_dir():
        raise SetupError(f"{str(file)!r} is a folder.", hint=f"Give the name of a file, such as {file / 'model.ckpt'}.")
    if os.path.lexists(file) and not force:
        raise SetupError(f"{str(file)!r} is there already.", hint="Give another name, or --force to overwrite it.")
    if not file.parent.is_dir():
        raise SetupError(f"There is no folder {str(file.parent)!r}.", hint=f"Try mkdir -p {file.parent}.")


def same_save(committed: Mapping[str, Manifest], manifest: Manifest) -> str | None:
    """Name under which a tier has the very save that a manifest is of, if it has."""
    return next((name for name, one in committed.items() if one.is_same_save(manifest)), None)


def push(source: LocalTier, name: str, manifest: Manifest, target: RemoteTier, tell: Told) -> int:
    """Copy a checkpoint from a folder to a cold tier; the bytes that had to be sent.

    Raises:
        CheckpointCorrupt: a file is not what the manifest says; nothing of the copy stays.
        SetupError: another checkpoint of that name is there.
    """
    if MANIFEST in target.files(name):
        _refuse_another(target, name, manifest)
        return 0
    target.claim(name)
    sent: list[int] = []

    def send(entry: FileEntry) -> None:
        sent.append(target.send(name, entry, source.path(store.holder(name, entry), entry.path)))

    try:
        _each(send, name, manifest, tell)
    except CheckpointCorrupt:
        if MANIFEST not in target.files(name):  # a run may have sent its own meanwhile
            target.remove(name)
        raise
    target.seal(name, manifest.standing_alone())
    return sum(sent)


@dataclass
class Pruned:
    """What a rule did to a tier: its ``judgements``, newest first, the names of what was ``removed``, and why others
    are ``left`` that were to go."""

    judgements: list[Judgement]
    removed: set[str] = field(default_factory=set)
    left: dict[str, str] = field(default_factory=dict)


def prune(
    tier: WritableTier, committed: Mapping[str, Manifest], keep: Keep, ranking: Ranking | None, *, dry_run: bool
) -> Pruned:
    """Judge the checkpoints of a tier, each run for itself; unless it is a dry run, remove what the rule gives up."""
    referred = {entry.at for manifest in committed.values() for entry in manifest if entry.at}
    pruned = Pruned(judge_runs(committed, keep, ranking, referred))
    for judgement in () if dry_run else pruned.judgements:
        if judgement.keep:
            continue
        try:
            why = store.forget(tier, judgement)
        except (OSError, ResilienceError) as error:
            why = _in_words(error)
        if why is None:
            pruned.removed.add(judgement.name)
        else:
            pruned.left[judgement.name] = why
    return pruned


def _in_words(error: OSError | ResilienceError) -> str:
    if isinstance(error, ResilienceError):
        return f"{error.message} {error.hint}".strip()
    return error.strerror or str(error)


def label(tier: LocalTier | RemoteTier, name: str, manifest: Manifest, *, pinned: bool) -> bool:
    """Let retention leave a checkpoint alone, or no longer; whether that changed anything."""
    labels = tuple(word for word in manifest.labels if word != PINNED) + ((PINNED,) if pinned else ())
    if set(labels) == set(manifest.labels):
        return False
    store.restate(tier, name, dataclasses.replace(manifest, labels=labels))
    return True


def _refuse_another(tier: Tier, name: str, manifest: Manifest) -> None:
    there = store.read_manifest(tier, name)
    if (there.run, there.sequence) != (manifest.run, manifest.sequence):  # copies do not refer to other checkpoints
        raise SetupError(
            f"{tier.where(name)!r} is another checkpoint: save {there.sequence} of run {there.run}, step {there.step}.",
            hint="Copy to another place.",
        )


def _each(work: Callable[[FileEntry], None], name: str, manifest: Manifest, tell: Told) -> None:
    """Do the work for each file, several at once; on an error or Ctrl-C only those at hand are finished."""
    pool = ThreadPoolExecutor(COPIES, thread_name_prefix="copy")
    try:
        under_way = {pool.submit(work, entry): entry for entry in manifest}
        for done in as_completed(under_way):
            done.result()
            tell(under_way[done].size, name)
    finally:
        pool.shutdown(cancel_futures=True)
