"""What the machine can do with the same bytes: the physical limits that the routes are compared with.

Every rank takes part at the same time, with what the best possible checkpoint would give it to do: of a state that all
ranks hold alike, each copies and writes its even share, and each reads all of it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch
import xxhash
from torch import Tensor

BLOCK = 16 * 2**20
PAGE = mmap.PAGESIZE


class Limits:
    """Bare operations on one buffer whose memory is already there.

    Args:
        folder: where files are written; on the disk that checkpoints go to.
        tensors: the state, the same on all ranks.
        rank: this rank.
        world_size: number of ranks.
        threads: most threads that a rank may use.
    """

    def __init__(self, folder: Path, tensors: Sequence[Tensor], rank: int, world_size: int, threads: int) -> None:
        self._folder = folder / f"limits-{rank}"
        self._folder.mkdir()
        self._threads = threads
        self._size = sum(tensor.nbytes for tensor in tensors)
        self._map = mmap.mmap(-1, -(-self._size // PAGE) * PAGE)
        self._buffer = memoryview(self._map)
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        whole.fill_(1)
        self._sources = list(tensors[rank::world_size])
        self._targets: list[Tensor] = []
        self.share = 0
        for tensor in self._sources:
            view = whole[self.share : self.share + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            self._targets.append(view)
            self.share += tensor.nbytes
        self._to_read = self._folder / "read"
        self._write(self._to_read, self._size, 0)

    def operations(self) -> dict[str, Callable[[], object]]:
        """What is measured, by name.  Variants of one limit are ``limit/variant``: the fastest of them is the limit."""
        operations: dict[str, Callable[[], object]] = {
            "copy": lambda: torch._foreach_copy_(self._targets, self._sources),
            "hash": lambda: xxhash.xxh3_128(self._buffer[: self.share]).digest(),
            "write/buffered": lambda: self._write(self._folder / "written", self.share, 0),
            "write/direct": lambda: self._write(self._folder / "written", self.share, os.O_DIRECT),
            "read/1 thread": lambda: self._read(1),
        }
        if not self._takes_direct():
            del operations["write/direct"]
        if self._threads > 1:
            operations[f"read/{self._threads} threads"] = lambda: self._read(self._threads)
        return operations

    def tidy(self) -> None:
        """Take away what was written, which is not part of writing it."""
        (self._folder / "written").unlink(missing_ok=True)

    def _takes_direct(self) -> bool:
        if not hasattr(os, "O_DIRECT"):
            return False
        with suppress(OSError):
            self._write(self._folder / "written", PAGE, os.O_DIRECT)
            return True
        return False

    def _write(self, path: Path, size: int, flags: int) -> None:
        """Write a new file and fsync it.  With O_DIRECT, whole pages: up to one more than was asked for."""
        if flags:
            size = -(-size // PAGE) * PAGE
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flags)
        try:
            for start in range(0, size, BLOCK):
                block = self._buffer[start : min(start + BLOCK, size)]
                while block:
                    block = block[os.write(fd, block) :]
            os.fsync(fd)
        finally:
            os.close(fd)

    def _read(self, threads: int) -> None:
        """Read a file that is in the page cache into the buffer."""
        fd = os.open(self._to_read, os.O_RDONLY)

        def part(start: int) -> None:
            stop = min(start + BLOCK, self._size)
            while start < stop:
                start += os.preadv(fd, [self._buffer[start:stop]], start)

        starts = range(0, self._size, BLOCK)
        try:
            if threads == 1:
                for start in starts:
                    part(start)
            else:
                with ThreadPoolExecutor(threads) as pool:
                    list(pool.map(part, starts))
        finally:
            os.close(fd)
