"""The cold tier: checkpoints behind a URL, file for file as they are on disk, the manifest last.

There are no folders and no renames there, so a checkpoint's name is in its keys from the first file on, and only the
manifest makes it one: a name without a manifest is nothing, however much lies under it.  Who puts the first file under
a name puts a marker there before, ``.unsealed``, and takes it away once the manifest is there; a removal has one too.
So what a kill leaves can be told from what others keep there: it has a marker, and that is old.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
import uuid
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import xxhash

from lightning_resilience import points
from lightning_resilience.errors import ResilienceError, TierDenied, TierUnavailable
from lightning_resilience.manifest import EXTENSION, MANIFEST, META, METADATA, FileEntry, Manifest, digest
from lightning_resilience.objects import Objects, open_objects
from lightning_resilience.patience import Patience
from lightning_resilience.tiers import Ready, final_name, is_there
from lightning_resilience.transfer import PART, Read, Stat

if TYPE_CHECKING:
    from typing_extensions import Buffer

log = logging.getLogger("lightning_resilience")

UNSEALED = ".unsealed"
"""Name of the marker: somebody is putting files here, or taking them away.  JSON with ``time``, in seconds since 1970,
and a ``token`` of who does it."""
AFRESH = 3600
"""Seconds after which who is still at it puts the marker anew."""
FORSAKEN = 86400
"""Age in seconds of a marker at which nobody is at it any more."""

_OURS = re.compile(
    rf"__\d+_\d+\.distcp|rank_\d+\.pt|{re.escape(METADATA)}|{re.escape(META)}|{re.escape(MANIFEST)}|{re.escape(UNSEALED)}"
)
"""Names of the files that are put under the name of a checkpoint."""


class RemoteTier:
    """Checkpoints behind a URL.

    Args:
        url: of the folder that holds them, e.g. ``s3://bucket/run7``.
        options: ``storage_options`` for it.
        patience: how long to try again what may go away by itself.

    Raises:
        SetupError: the URL cannot be one, or a package is missing for it.
    """

    READERS: ClassVar[int] = 16

    def __init__(self, url: str, options: Mapping[str, Any] | None = None, patience: Patience | None = None) -> None:
        self.objects: Objects = open_objects(url, options)
        self.patience = patience or Patience()
        self._token = uuid.uuid4().hex

    def __repr__(self) -> str:
        return f"RemoteTier({self.objects.url!r})"

    # -- reading ------------------------------------------------------------------------------------------------------

    def where(self, name: str = "", file: str = "") -> str:
        """URL of the tier, of a checkpoint or of one of its files."""
        return "/".join(filter(None, (self.objects.url, name, file)))

    def names(self) -> list[str]:
        """Names of what may be checkpoints."""
        return sorted(name for name in self.patience(self.objects.folders) if name.endswith(EXTENSION))

    def leftovers(self) -> list[str]:
        """None: what is unfinished has the name that it will have."""
        return []

    def exists(self, name: str) -> bool:
        """Whether there is any file of a checkpoint."""
        return bool(self.files(name))

    def files(self, name: str) -> dict[str, int]:
        """Size of each file of a checkpoint, committed or not."""
        prefix = f"{name}/"
        return {key.removeprefix(prefix): size for key, size in self.patience(lambda: [*self.objects.entries(prefix)])}

    def is_marked(self, name: str) -> bool:
        """Whether somebody is putting files under a name, or taking them away, or was when it was killed."""
        return self.size(name, UNSEALED) is not None

    def read(self, name: str, file: str) -> bytes:
        """Content of a small file; FileNotFoundError where it is not there."""
        return self.patience(lambda: self.objects.get(f"{name}/{file}"))

    def size(self, name: str, file: str) -> int | None:
        """Bytes of a file, or None where it is not there."""
        found = self.patience(lambda: self.objects.stat(f"{name}/{file}"))
        return found.size if found is not None else None

    def digest(self, name: str, file: str) -> str:
        """xxh3_128 of a file, read through once."""
        state = xxhash.xxh3_128()
        size = self.size(name, file) or 0
        for start in range(0, size, PART):
            stop = min(start + PART, size)
            state.update(self.patience(lambda a=start, b=stop: self.objects.get(f"{name}/{file}", a, b)))  # type: ignore[misc]
        return state.hexdigest()

    def fetch(self, name: str, entry: FileEntry, target: Path) -> None:
        """Copy a file to a local path, several ranges at once, and make it survive power loss.  Whether it is what its
        manifest says is not looked at; see ``LocalTier.arriving``."""
        with open(target, "wb") as stream:
            fd = stream.fileno()

            def write(start: int, piece: bytes) -> None:
                view = memoryview(piece)
                while view:
                    count = os.pwrite(fd, view, start)
                    view, start = view[count:], start + count

            self.patience(lambda: self.objects.fetch(f"{name}/{entry.path}", entry.size, write))
            os.fsync(fd)

    # -- writing ------------------------------------------------------------------------------------------------------

    def probe(self) -> None:
        """Write, read and delete a small object.

        Raises:
            TierDenied: one of the three is not allowed, or there is no such bucket.
            TierUnavailable: the store does not answer.
        """
        key, content = f".probe-{uuid.uuid4().hex}", b"lightning_resilience may write here"
        try:
            self.patience(lambda: self.objects.put(key, _from_memory(content), len(content), digest(content)))
            if self.patience(lambda: self.objects.get(key)) != content:
                raise TierUnavailable(f"{self.where()} gives back other content than was put there.")
            self.patience(lambda: self.objects.delete([key]))
        except FileNotFoundError as error:
            raise TierDenied(f"{self.where()} does not have what was put there: {error}") from error

    def send(self, name: str, entry: FileEntry, source: Path) -> int:
        """Copy a local file there, unless it is there already; the number of bytes that had to be sent.

        Raises:
            CheckpointCorrupt: the local file is not what its manifest says.
            FileNotFoundError: it is gone.
        """
        key = f"{name}/{entry.path}"
        self.claim(name)
        if self.patience(lambda: self.objects.stat(key)) == Stat(entry.size, entry.xxh3_128):
            return 0
        points.reach("replicate.file")
        fd = os.open(source, os.O_RDONLY)
        try:
            self.patience(
                lambda: self.objects.put(
                    key, lambda start, length: os.pread(fd, length, start), entry.size, entry.xxh3_128
                )
            )
        finally:
            os.close(fd)
        return entry.size

    def seal(self, name: str, manifest: Manifest) -> None:
        """Make a checkpoint of files that are there: check that all are, write the manifest, take the marker away.

        Raises:
            TierUnavailable: a file is missing, or has another size.
        """
        name = final_name(name)
        there = self.files(name)
        wrong = [entry.path for entry in manifest if entry.at is None and there.get(entry.path) != entry.size]
        if wrong:
            raise TierUnavailable(f"{self.where(name)} lacks {', '.join(wrong[:5])}.")
        content = manifest.to_bytes()
        points.reach("replicate.manifest")
        self.patience(
            lambda: self.objects.put(f"{name}/{MANIFEST}", _from_memory(content), len(content), digest(content))
        )
        points.reach("replicate.end")
        with suppress(ResilienceError):  # beside a manifest it means nothing
            self.objects.delete([f"{name}/{UNSEALED}"])

    def claim(self, name: str) -> None:
        """Put the marker under a name, unless there is a fresh one."""
        age = self._age_of_marker(name)
        if age is None or age > AFRESH:
            self.patience(lambda: self._mark(name))

    def _mark(self, name: str) -> None:
        content = json.dumps({"time": time.time(), "token": self._token}).encode()
        self.objects.put(f"{name}/{UNSEALED}", _from_memory(content), len(content), digest(content))

    def _age_of_marker(self, name: str) -> float | None:
        """Seconds since the marker was put; None where there is none of ours."""
        try:
            return time.time() - float(json.loads(self.read(name, UNSEALED))["time"])
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return None

    def sweep_uploads(self) -> None:
        """Give up the uploads that a killed process began and never ended."""
        if count := self.patience(lambda: self.objects.sweep(_is_ours)):
            log.info("event=sweep tier=cold url=%s uploads=%d", self.where(), count)

    def sweep(self, unsealed: Collection[str]) -> None:
        """Delete what a killed save, copy or removal left.

        Args:
            unsealed: names without a manifest.  Only what has an old marker, and no files but ours, is deleted; a
                marker beside a manifest goes alone.
        """
        for name in unsealed:
            age = self._age_of_marker(name)
            if age is None or age < FORSAKEN:
                continue
            files = self.files(name)
            if MANIFEST in files:
                self.patience(lambda name=name: self.objects.delete([f"{name}/{UNSEALED}"]))  # type: ignore[misc]
            elif all(map(_OURS.fullmatch, files)):
                self._delete(name, files)
                log.info("event=sweep tier=cold url=%s files=%d", self.where(name), len(files))

    # -- saving without a local folder --------------------------------------------------------------------------------

    def check_writable(self) -> None:
        """See ``probe``."""
        self.probe()

    def begin(self, name: str) -> None:
        """Put the marker, unless another rank has."""
        self.claim(final_name(name))

    def hold(self, name: str) -> AbstractContextManager[None]:
        """Nothing: there are no locks."""
        return nullcontext()

    def is_held(self, name: str) -> bool:
        """Never known here."""
        return False

    def write(self, name: str, file: str, data: Buffer, rank: int = 0, ready: Ready = is_there) -> FileEntry:
        """Put a file of a checkpoint that is being saved, under the name that it will have, once all of it is
        ``ready``; see ``LocalTier.write``."""
        points.reach("persist.file")
        view = memoryview(data).cast("B")
        ready(len(view))
        entry = FileEntry(path=file, size=len(view), xxh3_128=digest(view), rank=rank)
        key = f"{final_name(name)}/{file}"
        self.patience(lambda: self.objects.put(key, _from_memory(view), entry.size, entry.xxh3_128))
        return entry

    def put_manifest(self, name: str, content: bytes) -> None:
        """Put a manifest in the place of an older one."""
        self.write(name, MANIFEST, content)

    def sync(self, name: str = "") -> None:
        """Nothing: what was put lasts."""

    def publish(self, partial: str, name: str, *, replace: bool = False) -> None:
        """Nothing: with its manifest the checkpoint is there."""

    def withdraw(self, partial: str, files: Collection[str]) -> None:
        """Take files of a dropped save away, the manifest first; the last rank out takes the marker."""
        name = final_name(partial)
        with suppress(ResilienceError, OSError):
            self.objects.delete([f"{name}/{file}" for file in sorted(files, key=lambda file: file != MANIFEST)])
            if [key for key, _ in self.objects.entries(f"{name}/")] == [f"{name}/{UNSEALED}"]:
                self.objects.delete([f"{name}/{UNSEALED}"])

    def discard(self, name: str) -> None:
        """See ``remove``."""
        self.remove(name)

    def point(self, link: str, name: str) -> None:
        """Nothing: there are no links."""

    def remove(self, name: str) -> None:
        """Delete a checkpoint, its manifest first, and the marker of that last."""
        with suppress(ResilienceError):  # a bucket that is full takes no marker, and must be made room in
            self._mark(name)
        self.patience(lambda: self.objects.delete([f"{name}/{MANIFEST}"]))
        points.reach("forget.remote")
        self._delete(name, self.files(name))

    def _delete(self, name: str, files: Collection[str]) -> None:
        keys = [f"{name}/{file}" for file in files if file != UNSEALED]
        self.patience(lambda: self.objects.delete(keys))
        self.patience(lambda: self.objects.delete([f"{name}/{UNSEALED}"]))


def _is_ours(key: str) -> bool:
    """Whether a key is one of a checkpoint here, or of its folder."""
    name, _, file = key.partition("/")
    return name.endswith(EXTENSION) and (not file or bool(_OURS.fullmatch(file)))


def _from_memory(content: bytes | memoryview) -> Read:
    return lambda start, length: bytes(content[start : start + length])
