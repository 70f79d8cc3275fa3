"""The RAM tier: what a killed process leaves in memory for the next start of its run on the same node.

Slots (see ``slots``) are files on tmpfs, which outlive a process that is killed.  Their folder tells whose they are::

    <tmpfs>/lightning_resilience-memory-<user id>-<digest of the run folder's path or URL>-<token>/    one process's
        lock-…                             held while that process lives
        slot-…/                            files of one save, under the names that they have in a checkpoint
            __0_0.distcp  __0_1.distcp     the slot itself
            rank_00000.pt  meta.pt  …      what else this rank wrote of that save
            saved.json                     size and digest of each, as of when they were written to the run folder

There is no commit here: *content decides*.  A file is used if, and only if, it has the name, the size and the digest
that a manifest states, as is found out by reading it, before it is loaded or on the way.  So a slot that was half
refilled, or holds another step than the one that all ranks agree on, is nothing to anybody; ``saved.json`` only spares
reading those.

All of it is private to the user (folders 0700, files 0600), and what is not so is not looked at; neither is what a
living process, or another run, has there.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_resilience import scratch
from lightning_resilience.manifest import FileEntry, Manifest, digest
from lightning_resilience.scratch import is_private
from lightning_resilience.tiers import digest_of

if TYPE_CHECKING:
    from typing_extensions import Buffer

PREFIX = f"{scratch.PREFIX}memory-"
SLOT = "slot-"
SAVED = "saved.json"
ABANDONED = 3600.0
"""Seconds after its last save that what a dead run left is kept for its next start, whichever run starts meanwhile."""


def token_of(run: str) -> str:
    """Begins the token of the folders of a run.

    Args:
        run: path or URL of its folder, the same for the same place.
    """
    return f"{digest(run.encode())[:16]}-"


# -- what a living process notes --------------------------------------------------------------------------------------


def note(slot: Path, entries: Iterable[FileEntry], small: Mapping[str, Buffer]) -> None:
    """Note what a slot holds, now that it is written elsewhere.

    Args:
        slot: its folder.
        entries: what the manifest will say of the files of this rank.
        small: content of those that are not in the slot, to be put beside it; where there is no room, they are not.
    """
    with suppress(OSError):
        for file, content in small.items():
            _write(slot / file, content)
        saved = json.dumps([entry.to_dict() for entry in entries]).encode()
        _write(slot / f".{SAVED}", saved)
        os.replace(slot / f".{SAVED}", slot / SAVED)


def _write(path: Path, content: Buffer) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
        file.write(content)


# -- what dead ones left ----------------------------------------------------------------------------------------------


class MemoryTier:
    """What killed processes of a run left in the memory of this node, until it is released.

    Args:
        root: the tmpfs, or None where there is no RAM tier.
    """

    def __init__(self, root: Path | None) -> None:
        self._root = root
        self._tokens: dict[str, None] = {}
        self._held: list[int] = []
        self._index: dict[tuple[str, int, str], list[Path]] | None = None

    @property
    def node(self) -> tuple[object, ...]:
        """The same for processes that see the same memory, and for no others."""
        if self._root is None:
            return ()
        status = os.stat(self._root)
        return (_machine(), status.st_dev, status.st_ino)

    def look_for(self, run: str) -> None:
        """Look for what this run left, too; see ``token_of``."""
        self._tokens[token_of(run)] = None
        self._index = None

    def claims(self, manifest: Manifest) -> dict[str, list[Path]]:
        """Where files of a checkpoint seem to be, by name; only ``whole`` says whether they are.

        What is told of stays there until it is released.
        """
        if self._index is None:
            self._index = self._find()
        claimed = {entry.path: self._index.get((entry.path, entry.size, entry.xxh3_128), []) for entry in manifest}
        return {file: paths for file, paths in claimed.items() if paths}

    def _find(self) -> dict[tuple[str, int, str], list[Path]]:
        index: dict[tuple[str, int, str], list[Path]] = {}
        for folder in self._folders():
            if held := scratch.hold_dead(folder):
                self._held += held
                for slot in sorted(folder.glob(f"{SLOT}*")):
                    for entry in _saved_in(slot):
                        index.setdefault((entry.path, entry.size, entry.xxh3_128), []).append(slot / entry.path)
        return index

    def _folders(self) -> list[Path]:
        if self._root is None:
            return []
        return [folder for token in self._tokens for folder in scratch.folders(self._root, PREFIX, token)]

    def release(self) -> None:
        """What was told of may go: nobody here reads it any more."""
        self._index = None
        for fd in self._held:
            os.close(fd)
        self._held.clear()

    def remove(self) -> None:
        """Give back the memory that dead processes of the run took, unless somebody else reads it."""
        for folder in self._folders():
            scratch.remove_if_dead(folder)


def _machine() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return socket.gethostname()


def _saved_in(slot: Path) -> list[FileEntry]:
    """The files that a slot was last written with; none where it never was."""
    try:
        if is_private(slot) and is_private(slot / SAVED):
            return [FileEntry.from_dict(raw) for raw in json.loads((slot / SAVED).read_bytes())]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return []


def whole(entry: FileEntry, paths: Iterable[Path], *, by_size: bool = False) -> Path | None:
    """The first file that is what a manifest says, by size and digest, or may be, by its size alone."""
    for path in paths:
        with suppress(OSError):
            fits = is_private(path) and path.stat().st_size == entry.size
            if fits and (by_size or digest_of(path) == entry.xxh3_128):
                return path
    return None


def sweep(root: Path, older_than: float = ABANDONED) -> None:
    """Give back the memory that dead processes of this user took, of whichever run, where their last save was more
    than so many seconds ago."""
    for folder in scratch.folders(root, PREFIX):
        if time.time() - _last_used(folder) >= older_than:
            scratch.remove_if_dead(folder)


def _last_used(folder: Path) -> float:
    times = [0.0]
    for path in (folder, *folder.glob(f"{SLOT}*"), *folder.glob(f"{SLOT}*/{SAVED}")):
        with suppress(OSError):
            times.append(path.lstat().st_mtime)
    return max(times)
