"""Folders that end with their processes.

Private to the user (0700), each with a lock for every process that uses it, which the kernel drops when that dies; so
the next start can tell the dead from the living, and frees what they left.  A process that was forked (a loader worker)
lets go of the lock at once: it may outlive the one whose folder it is.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import uuid
import weakref
from contextlib import suppress
from pathlib import Path

PREFIX = "lightning_resilience-"
"""Of the folders of this user's processes, before the user's id; what is not swept here has another."""
_LOCK = "lock-"

_open: weakref.WeakSet[Scratch] = weakref.WeakSet()


class Scratch:
    """A folder for as long as this process lives.

    Args:
        root: where.
        token: tells it from others; processes of this user that give the same one use the same folder.
        prefix: begins its name.
    """

    def __init__(self, root: Path, token: str, prefix: str = PREFIX) -> None:
        self.path = root / f"{prefix}{os.getuid()}-{token}"
        self.path.mkdir(mode=0o700, exist_ok=True)
        name = f"{_LOCK}{uuid.uuid4().hex[:8]}"
        fresh = self.path / f".{name}"
        self._lock: int | None = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            fresh.rename(self.path / name)  # locked before it gets the name that a sweep looks for
        except OSError:  # a file system without locks: what is not locked is not swept
            fresh.unlink()
        _open.add(self)

    def empty(self) -> None:
        """Delete what is in it."""
        with suppress(FileNotFoundError), os.scandir(self.path) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path, ignore_errors=True)
                elif not entry.name.startswith((_LOCK, f".{_LOCK}")):
                    with suppress(OSError):
                        os.unlink(entry.path)

    def close(self, *, remove: bool = True) -> None:
        """Use it no more; ``remove`` it too, where nobody else does."""
        if self._lock is None:
            return
        if remove:
            shutil.rmtree(self.path, ignore_errors=True)
        self._let_go()

    def _let_go(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _let_go_of_the_parent() -> None:
    for scratch in [*_open]:
        scratch._let_go()
    _open.clear()


os.register_at_fork(after_in_child=_let_go_of_the_parent)


def folders(root: Path, prefix: str = PREFIX, token: str = "") -> list[Path]:
    """The folders under ``root`` of this user's processes, dead or alive, whose token begins with ``token``."""
    return sorted(folder for folder in root.glob(f"{prefix}{os.getuid()}-{token}*") if is_private(folder))


def sweep(root: Path) -> None:
    """Remove the folders under ``root`` whose processes, of this user, are gone."""
    for folder in folders(root):
        remove_if_dead(folder)


def remove_if_dead(folder: Path) -> None:
    """Remove a folder unless a process uses it or reads what a dead one left there."""
    held = _lock_all(folder, fcntl.LOCK_EX)
    if held:
        shutil.rmtree(folder, ignore_errors=True)
    _close(held)


def hold_dead(folder: Path) -> list[int]:
    """Keep what a dead process left from being removed until the returned files are closed; none where a process uses
    the folder."""
    return _lock_all(folder, fcntl.LOCK_SH)


def _lock_all(folder: Path, how: int) -> list[int]:
    """Take the locks of a folder, open files; none where a process has one, or where there is none: such a folder is
    being made, or removed, just now."""
    held: list[int] = []
    for lock in folder.glob(f"{_LOCK}*"):
        try:
            held.append(os.open(lock, os.O_RDWR | os.O_NOFOLLOW))
            fcntl.flock(held[-1], how | fcntl.LOCK_NB)
        except FileNotFoundError:
            continue
        except OSError:
            _close(held)
            return []
    return held


def _close(files: list[int]) -> None:
    for fd in files:
        os.close(fd)


def is_private(path: Path) -> bool:
    """Whether a folder or file itself, no link to one, is this user's and nobody else may read or write it."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    rights = {stat.S_IFDIR: 0o700, stat.S_IFREG: 0o600}.get(stat.S_IFMT(status.st_mode))
    return status.st_uid == os.getuid() and status.st_mode & 0o777 == rights
