"""A tensor as ``torch.save`` stored it in a shard file: where its elements are."""

from __future__ import annotations

from pathlib import Path

from lightning_resilience.errors import CheckpointCorrupt

HEAD = 4096
"""Bytes of a stored tensor in which its elements begin."""
_LOCAL_HEADER = b"PK\x03\x04"
_RECORD = b"/data/0"


class Stored:
    """One of them, whose elements are ``size`` bytes somewhere in the ``length`` bytes from ``at`` on of the file at
    ``path``.

    Where they ``begin`` in the file is not known before its head is read.
    """

    def __init__(self, path: Path, at: int, length: int, size: int) -> None:
        self.path = path
        self.at = at
        self.length = length
        self.size = size
        self.begin: int | None = None

    @property
    def end(self) -> int:
        """Where it ends in the file."""
        return self.at + self.length

    @property
    def head(self) -> int:
        """Bytes of it that are its head."""
        return min(HEAD, self.length)

    def locate(self, head: bytes) -> None:
        """Learn from its head where its elements begin.

        Raises:
            CheckpointCorrupt: this is not the head of such a tensor.
        """
        self.begin = self.at + self._elements_in(head)

    def _elements_in(self, head: bytes) -> int:
        name = head.find(_RECORD)
        header = head.rfind(_LOCAL_HEADER, 0, max(name, 0))
        if name < 0 or header < 0:
            raise CheckpointCorrupt(f"{self.path}: no tensor at byte {self.at}.")
        # A local header of ZIP (APPNOTE 4.3.7): 30 bytes, whose last four are the lengths of name and extra field.
        start = header + 30 + int.from_bytes(head[header + 26 : header + 28], "little")
        start += int.from_bytes(head[header + 28 : header + 30], "little")
        if start + self.size > self.length:
            raise CheckpointCorrupt(f"{self.path}: the tensor at byte {self.at} is cut short.")
        return start
