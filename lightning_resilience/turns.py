"""Whose save is next, where several callbacks of a Trainer share one engine, which makes one save at a time.

A callback whose save was refused because of another's stands in line: it saves as soon as that has ended, before any
other does again by its schedule.  So one that saves at every step leaves room for one that saves seldom.

Every rank keeps the same line, because saves are begun and refused on all of them alike.
"""

from __future__ import annotations

from lightning_resilience.saves import Folder, Save


class Turns:
    """The line of the folders that are to be saved to."""

    def __init__(self) -> None:
        self._line: list[Folder] = []
        self._latest: Save | None = None

    def began(self, save: Save) -> None:
        """A save was started."""
        self._latest = save
        self.leave(save.folder)

    def refused(self, folder: Folder) -> None:
        """A save was not made because another is under way: it is next, unless that one is to the same folder."""
        if not self.was_mine(folder):
            self.wait(folder)

    def wait(self, folder: Folder) -> None:
        """Stand in line, unless it does."""
        if folder not in self._line:
            self._line.append(folder)

    def leave(self, folder: Folder) -> None:
        """Stand in line no more."""
        if folder in self._line:
            self._line.remove(folder)

    def waits(self, folder: Folder) -> bool:
        """Whether it stands in line."""
        return folder in self._line

    def is_next(self, folder: Folder) -> bool:
        """Whether nobody else stands in line before it."""
        return not self._line or self._line[0] is folder

    def was_mine(self, folder: Folder) -> bool:
        """Whether the latest save was to this folder."""
        return self._latest is not None and self._latest.folder is folder

    def was_anothers(self, folder: Folder, step: int) -> bool:
        """Whether the latest save is another's of this very step."""
        return self._latest is not None and self._latest.folder is not folder and self._latest.step == step
