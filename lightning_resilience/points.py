"""Named points of the save pipeline, where a test or a drill can hold, break or kill a run on purpose.

In a normal run nobody listens, and reaching a point costs one truth test.  The names, in the order a save passes them::

    stage.piece         before each piece that is copied behind the training thread, on the thread that copies it
    staged              the slot holds the state; nothing is written yet
    persist.begin       the background thread is about to write
    persist.file        before each file
    persist.mid-file    after the first block of each file
    persist.end         all files of this rank are durable; the others do not know yet
    commit.begin        all ranks have reported; before the manifest
    commit.manifest     after the manifest, before the rename
    commit.renamed      after the rename, before its folder is synced
    commit.end          committed, before the ranks are told
    forget.begin        before a checkpoint is taken out
    forget.renamed      after the rename, before its files go
    forget.end          after its files are gone
    replicate.file      before each file that is sent to the cold tier
    replicate.manifest  all files are there; before the manifest
    replicate.end       after it
    forget.remote       in the cold tier, after a manifest is gone and before its files go
"""

from __future__ import annotations

from collections.abc import Callable

_listeners: list[Callable[[str], None]] = []


def reach(name: str) -> None:
    """Tell the listeners that the calling thread is at ``name``."""
    for listener in _listeners:
        listener(name)


def listen(listener: Callable[[str], None]) -> Callable[[], None]:
    """Call ``listener(name)`` at every point from now on; the returned function ends it."""
    _listeners.append(listener)
    return lambda: _listeners.remove(listener)
