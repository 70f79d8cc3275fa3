"""Folders that end with their processes.

Private to the user (0700), each with a lock for every process that uses it, which the kernel drops when that dies; so
the next start can tell the dead from the living, and frees what they left.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from contextlib import suppress
from pathlib import Path

_PREFIX = "lightning_resilience-"
_LOCK = "lock-"


class Scratch:
    """A folder for as long as this process lives.

    Args:
        root: where.
        token: tells it from others; processes of this user that give the same one use the same folder.
    """

    def __init__(self, root: Path, token: str) -> None:
        self.path = root / f"{_PREFIX}{os.getuid()}-{token}"
        self.path.mkdir(mode=0o700, exist_ok=True)
        name = f"{_LOCK}{uuid.uuid4().hex[:8]}"
        fresh = self.path / f".{name}"
        self._lock: int | None = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            fresh.rename(self.path / name)  # locked before it gets the name that a sweep looks for
        except OSError:  # a file system without locks: what is not locked is not swept
            fresh.unlink()

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
        os.close(self._lock)
        self._lock = None


def sweep(root: Path) -> None:
    """Remove the folders under ``root`` whose processes, of this user, are gone."""
    for folder in root.glob(f"{_PREFIX}{os.getuid()}-*"):
        locks = [*folder.glob(f"{_LOCK}*")]
        if locks and not any(map(_is_held, locks)):  # without one it is being made, or removed, just now
            shutil.rmtree(folder, ignore_errors=True)


def _is_held(lock: Path) -> bool:
    try:
        fd = os.open(lock, os.O_RDWR)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True  # its process lives
    finally:
        os.close(fd)
    return False
