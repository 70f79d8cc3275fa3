"""Where bytes live: one folder of checkpoints on a local or shared file system.

A tier moves bytes and knows nothing of what they mean.  Its promises are the ones a commit is built from: ``write``
returns when a file is whole and survives power loss, ``publish`` makes a folder appear under its name in one step,
``remove`` makes it disappear in one step.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeAlias

import xxhash

from lightning_resilience import durable, points
from lightning_resilience.errors import CheckpointCorrupt, CheckpointNotFound, TierDenied, TierUnavailable
from lightning_resilience.manifest import EXTENSION, MANIFEST, PARTIAL, REMOVED, FileEntry, Manifest

if TYPE_CHECKING:
    from typing_extensions import Buffer

_LEFTOVER = re.compile(
    rf"{re.escape(EXTENSION)}({re.escape(PARTIAL)}|{re.escape(REMOVED)})"
    rf"|{re.escape(PARTIAL)}[0-9a-f]{{12}}-[0-9]+$|{re.escape(REMOVED)}[0-9a-f]{{8}}$"
)
"""Names of what is being saved or removed: any token after ``.ckpt``, which is ours; after other names (people choose
them for ``trainer.save_checkpoint``) only a token of the very form that we give out."""


def partial_name(name: str, token: str = "", number: int = 0) -> str:
    """What a checkpoint is called until it is whole.

    Args:
        name: that it will have.
        token: twelve hexadecimal digits that nobody else has; new ones if empty.
        number: tells names of one token apart.
    """
    return f"{name}{PARTIAL}{token or uuid.uuid4().hex[:12]}-{number}"


def final_name(name: str) -> str:
    """What a checkpoint that may not be whole yet will be called."""
    return name.partition(PARTIAL)[0]


FETCHED = ".fetched-"
"""Marks a file on its way to its place."""
ABANDONED = 3600
"""Seconds without a write after which nobody is at such a file any more."""
BLOCK = 16 * 2**20
"""Bytes hashed and written at a time."""
ALIGNED = 4096
"""Bytes that direct I/O takes a multiple of."""
HASH_BLOCK = 256 * 2**10
"""Bytes read and hashed at a time, few enough to stay in the processor's cache."""


Ready: TypeAlias = Callable[[int], object]
"""Asked, with a number of bytes, before so many of what is to be written are read: returns when they are there, and
raises if they never will be."""


def is_there(size: int) -> None:
    """``Ready``, where nothing is missing."""


class Tier(Protocol):
    """A place with checkpoints, as everything sees it that does not write one."""

    READERS: ClassVar[int]
    """How many small files are worth reading at once."""

    def names(self) -> list[str]:
        """Names of what may be checkpoints."""

    def leftovers(self) -> list[str]:
        """Names of what a save or a removal left unfinished."""

    def where(self, name: str = "", file: str = "") -> str:
        """Path or URL of the tier, of a checkpoint or of one of its files, for people."""

    def exists(self, name: str) -> bool:
        """Whether anything is there under the name of a checkpoint."""

    def read(self, name: str, file: str) -> bytes:
        """Content of a file; FileNotFoundError where it is not there."""

    def size(self, name: str, file: str) -> int | None:
        """Bytes of a file, or None where it is not there."""

    def digest(self, name: str, file: str) -> str:
        """xxh3_128 of a file as it is there now."""

    def remove(self, name: str) -> None:
        """Let a checkpoint disappear: at first its manifest, or all of it in one step."""


class RestatableTier(Tier, Protocol):
    """A tier in which manifests can be replaced."""

    def put_manifest(self, name: str, content: bytes) -> None:
        """Put a manifest in the place of a missing, damaged or older one, in one step."""


class WritableTier(RestatableTier, Protocol):
    """A tier that saves go to.  What is being saved is in ``partial``, a name of its own, until it is published."""

    def check_writable(self) -> None:
        """Raise TierDenied or TierUnavailable where nothing can be written."""

    def claim(self, name: str) -> None:
        """Let others see that files of ``name`` are on their way, where they have that name from the start."""

    def begin(self, name: str) -> None:
        """Get ready for files of ``name``."""

    def hold(self, name: str) -> AbstractContextManager[None]:
        """Let others see that a living process is writing ``name``."""

    def is_held(self, name: str) -> bool:
        """Whether a living process is writing ``name``."""

    def write(self, name: str, file: str, data: Buffer, rank: int = 0, ready: Ready = is_there) -> FileEntry:
        """Write a new file, of which ``ready`` tells how much is there; on return it is whole and lasts."""

    def sync(self, name: str = "") -> None:
        """Make the names of the files last."""

    def seal(self, name: str, manifest: Manifest) -> None:
        """Write the manifest of files that are there."""

    def publish(self, partial: str, name: str, *, replace: bool = False) -> None:
        """Let ``partial``, with its manifest in it, be the checkpoint ``name``."""

    def withdraw(self, partial: str, files: Collection[str]) -> None:
        """Take files of a dropped save away."""

    def discard(self, name: str) -> None:
        """Delete what is not a checkpoint."""

    def point(self, link: str, name: str) -> None:
        """Make a link to a checkpoint, where the tier has links."""


class LocalTier:
    """Checkpoints as folders in ``root``.

    Args:
        root: the run folder; it may not exist yet.
    """

    READERS: ClassVar[int] = 1

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root).absolute()

    def __repr__(self) -> str:
        return f"LocalTier({str(self.root)!r})"

    # -- reading ------------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Names of the folders that may be checkpoints: neither partial nor removed, links excluded."""
        return sorted(
            name for name in self._folders() if name.endswith(EXTENSION) and PARTIAL not in name and REMOVED not in name
        )

    def leftovers(self) -> list[str]:
        """Names of the folders that a save or a removal left unfinished."""
        return sorted(name for name in self._folders() if _LEFTOVER.search(name))

    def _folders(self) -> Iterator[str]:
        try:
            with os.scandir(self.root) as entries:
                yield from (entry.name for entry in entries if not entry.is_symlink() and entry.is_dir())
        except (FileNotFoundError, NotADirectoryError):
            return

    def path(self, name: str, file: str = "") -> Path:
        """Where a checkpoint, or one of its files, is."""
        return self.root / name / file if file else self.root / name

    def where(self, name: str = "", file: str = "") -> str:
        """Path of the tier, of a checkpoint or of one of its files, for people."""
        return str(self.path(name, file)) if name else str(self.root)

    def exists(self, name: str) -> bool:
        """Whether anything is there under the name of a checkpoint."""
        return os.path.lexists(self.path(name))

    def read(self, name: str, file: str) -> bytes:
        """Content of a file.

        Raises:
            FileNotFoundError: it is not there.
        """
        return self.path(name, file).read_bytes()

    def size(self, name: str, file: str) -> int | None:
        """Bytes of a file, or None where it is not there."""
        try:
            return self.path(name, file).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def digest(self, name: str, file: str) -> str:
        """xxh3_128 of a file as it is on disk now."""
        return digest_of(self.path(name, file))

    # -- writing ------------------------------------------------------------------------------------------------------

    def check_writable(self) -> None:
        """Create the folder, durably, and write and remove a small file in it.

        Raises:
            TierDenied: the folder may not be written.
            TierUnavailable: it cannot be, for another reason (it is a file, the disk is full, …).
        """
        probe = self.root / f".probe-{uuid.uuid4().hex}"
        try:
            _make_durably(self.root)
            try:
                probe.write_bytes(b"ok")
            finally:
                probe.unlink(missing_ok=True)
        except PermissionError as error:
            raise TierDenied(
                f"The checkpoint folder {str(self.root)!r} cannot be written: {error.strerror}.",
                hint="Give dirpath= a folder that this user may write.",
            ) from error
        except OSError as error:
            is_file = error.errno in (errno.EEXIST, errno.ENOTDIR)
            cause = "it is a file" if is_file else error.strerror
            raise TierUnavailable(
                f"The checkpoint folder {str(self.root)!r} cannot be used: {cause}.",
                hint="Give dirpath= a folder." if is_file else "Check the disk behind dirpath=.",
            ) from error

    def claim(self, name: str) -> None:
        """Nothing: what is being saved has a name of its own."""

    def begin(self, name: str) -> None:
        """Make the folder ``name``, empty or as another rank has begun it."""
        self.path(name).mkdir(parents=True, exist_ok=True)

    @contextmanager
    def hold(self, name: str) -> Iterator[None]:
        """Let others see (``is_held``) that a living process is writing to the folder.

        It is a lock that the kernel drops when this process dies.  On a file system without locks there is none.
        """
        fd = os.open(self.path(name), os.O_RDONLY | os.O_DIRECTORY)
        try:
            with suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_SH)
            yield
        finally:
            os.close(fd)

    def is_held(self, name: str) -> bool:
        """Whether a living process is writing to the folder."""
        try:
            fd = os.open(self.path(name), os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        finally:
            os.close(fd)
        return False

    def write(self, name: str, file: str, data: Buffer, rank: int = 0, ready: Ready = is_there) -> FileEntry:
        """Write ``data`` as a new file; on return it is whole and survives power loss.

        Args:
            name: the folder.
            file: name of the file.
            data: its content.
            rank: who writes it, for the manifest.
            ready: tells how much of ``data`` is there; asked by several threads.

        Returns:
            What the manifest says of it: size and digest of the bytes that were handed to the disk.
        """
        points.reach("persist.file")
        view = memoryview(data).cast("B")
        path = self.path(name, file)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            with _Hashing(view, ready) as hashing:
                _write_file(fd, view, ready)
                os.fsync(fd)
        finally:
            os.close(fd)
        return FileEntry(path=file, size=len(view), xxh3_128=hashing.digest, rank=rank)

    def sync(self, name: str = "") -> None:
        """Make the folder's list of names survive power loss."""
        durable.sync(self.path(name))

    def seal(self, name: str, manifest: Manifest) -> None:
        """Write the manifest, durably."""
        self.write(name, MANIFEST, manifest.to_bytes())
        self.sync(name)

    def publish(self, partial: str, name: str, *, replace: bool = False) -> None:
        """Let the whole folder ``partial`` appear as ``name``, in one step (in two where an older one gives way).

        Args:
            partial: a folder with its manifest already in it.
            name: the name it gets.
            replace: whether a folder or file of that name gives way.

        Raises:
            FileExistsError: the name is taken and ``replace`` is false.
        """
        target = self.path(name)
        replaced = None
        if target.exists() or target.is_symlink():
            if not replace:
                raise FileExistsError(errno.EEXIST, "a published checkpoint is never written again", str(target))
            replaced = f"{name}{REMOVED}{uuid.uuid4().hex[:8]}"
            os.rename(target, self.path(replaced))
        try:
            os.rename(self.path(partial), target)
        except OSError:
            if replaced:
                os.rename(self.path(replaced), target)
            raise
        points.reach("commit.renamed")
        self.sync()
        if replaced:
            self.discard(replaced)

    def withdraw(self, partial: str, files: Collection[str]) -> None:
        """Take files of a dropped save away; the last rank out removes the folder."""
        with suppress(OSError):
            for file in files:
                self.path(partial, file).unlink(missing_ok=True)
            self.path(partial).rmdir()

    @contextmanager
    def arriving(self, name: str, entry: FileEntry, origin: str) -> Iterator[Path]:
        """Let a file of a checkpoint come here from elsewhere: the block writes it, durably, to the path that it gets.
        Then it is put in its place if it is what the manifest says; otherwise the place stays as it was.

        Args:
            name: the folder that is to hold it; it is there.
            entry: what the manifest says.
            origin: where it comes from, for people.

        Raises:
            CheckpointCorrupt: something else came.
            TierUnavailable: there is no room for it.
        """
        target = self.path(name, entry.path)
        sink = target.with_name(f".{entry.path}{FETCHED}{uuid.uuid4().hex[:12]}")
        try:
            yield sink
            if sink.stat().st_size != entry.size or digest_of(sink) != entry.xxh3_128:
                raise CheckpointCorrupt(
                    f"{entry.path} from {origin} has other content than was saved.",
                    problems=(f"{entry.path} from {origin} has other content than was saved",),
                )
            os.replace(sink, target)
            self.sync(name)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                raise
            raise TierUnavailable(
                f"{entry.path} ({entry.size:,} bytes) from {origin} finds no place in {str(self.root)!r}:"
                f" {error.strerror}.",
                hint="Make room there, or give dirpath= another folder.",
            ) from error
        finally:
            sink.unlink(missing_ok=True)

    def put_manifest(self, name: str, content: bytes) -> None:
        """Put a manifest in the place of a missing, damaged or older one, in one step."""
        fresh = f".{MANIFEST}{FETCHED}{uuid.uuid4().hex[:12]}"
        self.write(name, fresh, content)
        os.replace(self.path(name, fresh), self.path(name, MANIFEST))
        self.sync(name)

    def remove(self, name: str) -> None:
        """Let ``name`` disappear in one step, then free its bytes; other checkpoints that link to them keep theirs."""
        points.reach("forget.begin")
        removed = f"{name}{REMOVED}{uuid.uuid4().hex[:8]}"
        os.rename(self.path(name), self.path(removed))
        self.sync()
        points.reach("forget.renamed")
        self.discard(removed)
        points.reach("forget.end")

    def discard(self, name: str) -> None:
        """Delete a folder (or file) that is not a checkpoint, its manifest first; what is already gone is fine.

        A symbolic link goes, what it points to stays.
        """
        path = self.path(name)
        if path.is_dir() and not path.is_symlink():
            with suppress(FileNotFoundError):
                (path / MANIFEST).unlink()
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    def sweep_fetched(self) -> int:
        """Delete what a process that was killed while it healed a checkpoint left in it; how many files."""
        count = 0
        for path in self.root.glob(f"*{EXTENSION}/.*{FETCHED}*"):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > ABANDONED:
                    path.unlink()
                    count += 1
        return count

    def point(self, link: str, name: str) -> None:
        """Make the symbolic link ``link`` point to checkpoint ``name``, replacing an older link in one step."""
        path = self.root / link
        if path.exists() and not path.is_symlink():
            raise FileExistsError(errno.EEXIST, "is not a link", str(path))
        fresh = self.root / f".{link}-{uuid.uuid4().hex[:8]}"
        os.symlink(name, fresh)
        os.replace(fresh, path)


def digest_of(path: Path) -> str:
    """xxh3_128 of a file."""
    state = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as stream:
        block = bytearray(min(HASH_BLOCK, os.fstat(stream.fileno()).st_size + 1))
        view = memoryview(block)
        while count := stream.readinto(block):
            state.update(view[:count])
    return state.hexdigest()


def _make_durably(folder: Path) -> None:
    """Make a folder and those above it, and have their names survive power loss."""
    if not folder.exists():
        _make_durably(folder.parent)
        folder.mkdir(exist_ok=True)
        durable.sync(folder.parent)
    elif not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "is a file", str(folder))


class _Hashing:
    """xxh3_128 of ``view``, computed while it is being written."""

    def __init__(self, view: memoryview, ready: Ready) -> None:
        self._view = view
        self._ready = ready
        self.digest = ""
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="resilience-hash", daemon=True)

    def _run(self) -> None:
        try:
            state = xxhash.xxh3_128()
            for start in range(0, len(self._view), BLOCK):
                block = self._view[start : start + BLOCK]
                self._ready(start + len(block))
                state.update(block)
            self.digest = state.hexdigest()
        except BaseException as error:
            self._error = error

    def __enter__(self) -> _Hashing:
        if len(self._view) >= BLOCK:
            self._thread.start()
        else:
            self._run()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.ident is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error


def _write_file(fd: int, view: memoryview, ready: Ready) -> None:
    """Write a large file past the page cache where the file system takes it, and otherwise through it."""
    direct = len(view) >= BLOCK and _bypass_cache(fd, True)
    for start in range(0, len(view), BLOCK):
        block = view[start : start + BLOCK]
        ready(start + len(block))
        if direct and len(block) % ALIGNED:
            direct = _bypass_cache(fd, False)  # the tail
        try:
            _write_all(fd, block)
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            direct = _bypass_cache(fd, False)
            os.lseek(fd, start, os.SEEK_SET)
            _write_all(fd, block)
        if start == 0:
            points.reach("persist.mid-file")


def _bypass_cache(fd: int, on: bool) -> bool:
    """Switch O_DIRECT; whether it is on now."""
    try:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
    except OSError:
        return False
    return on


def local_path(path: str | os.PathLike[str]) -> Path:
    """A path or a ``file://`` URL as a Path; CheckpointNotFound for any other URL."""
    text = os.fspath(path)
    if "://" not in text:
        return Path(text).expanduser()
    if text.startswith("file://"):
        return Path(text.removeprefix("file://"))
    raise CheckpointNotFound(f"{text!r} is not on a local file system.", hint="Copy it to a local folder first.")


def _write_all(fd: int, block: memoryview) -> None:
    while len(block):
        block = block[os.write(fd, block) :]
