"""What ranks tell each other: an error of one of them is heard by all, and leaves none waiting."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from forks import run_forks
from lightning_resilience import ranks as module
from lightning_resilience.ranks import Ranks

CONTENT = bytes(range(256)) * 20
WORLD = 3


class Failing(io.FileIO):
    """A file on a disk that fails after the first block."""

    blocks = 0

    def _next(self) -> None:
        self.blocks += 1
        if self.blocks > 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def readinto(self, block: Any) -> int:
        self._next()
        return super().readinto(block)

    def write(self, block: Any) -> int:
        self._next()
        return super().write(block)


def copy_all(folder: Path) -> list[str]:
    """Rank 1 sends a file to rank 2, again and again, with something in the way each time but the last."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ranks = Ranks(rank, WORLD, timeout=30)
    module.BLOCK = 1000
    there = folder / "file"
    if rank == 1:
        there.write_bytes(CONTENT)
    told = []
    for number, (path, sink, fails_on) in enumerate(
        (
            (folder / "missing", folder / "sink", None),
            (folder, folder / "sink", None),
            (there, folder / "missing" / "sink", None),
            (there, folder / "sink", 1),
            (there, folder / "sink", 2),
            (there, folder / "sink", None),
        )
    ):
        module.open = Failing if rank == fails_on else open  # type: ignore[attr-defined]
        mine = sink.with_name(f"{sink.name}-{number}") if rank == 2 else None
        try:
            ranks.copy_file(1, path, mine)
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")
        else:
            told.append("")
        if mine is not None and not told[-1]:
            assert mine.read_bytes() == CONTENT
    ranks.close()
    dist.destroy_process_group()
    return told


@pytest.mark.ranks
def test_file_that_cannot_be_read_or_written_is_heard_of_by_all_ranks_and_the_next_one_arrives(tmp_path: Path) -> None:
    first, second, third = run_forks(copy_all, tmp_path, world_size=WORLD, timeout=60)
    assert first == second == third
    missing, folder, no_place, unreadable, unwritable, whole = first
    assert missing.startswith("CheckpointCorrupt: missing cannot be read: No such file")
    assert "Corrupt" in folder
    assert "cannot be read" in folder
    assert no_place.startswith("TierUnavailable: A file cannot be copied to")
    assert unreadable.startswith("CheckpointCorrupt: file cannot be read: Input/output error")
    assert unwritable.startswith("TierUnavailable")
    assert unwritable.endswith("Input/output error. Check the disk behind it.")
    assert whole == ""
