"""What survives the loss of power."""

from __future__ import annotations

import os


def sync(path: str | os.PathLike[str]) -> None:
    """Return when a file's content, or the names in a folder, survive it.

    Raises:
        OSError: they may not.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
