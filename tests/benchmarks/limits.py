"""What the machine can do with the same bytes: the physical limits that the routes are compared with.

Every rank takes part at the same time, with what the best possible checkpoint would give it to do: of a state that all
ranks hold alike, each copies and writes its even share, and each reads all of it.
"""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
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

    def operations(self) -> dict[str, Callable[[], object]]:
        """What is measured, by name.  Variants of one limit are ``limit/variant``: the fastest of them is the limit."""
        operations: dict[str, Callable[[], object]] = {
            "copy": lambda: torch._foreach_copy_(self._targets, self._sources),
            "hash": lambda: xxhash.xxh3_128(self._buffer[: self.share]).digest(),
            "write/buffered": lambda: self._write(self._folder / "written", self.share, 0),
            "write/direct": lambda: self._write(self._folder / "written", self.share, os.O_DIRECT),
        }
        if not self._takes_direct():
            del operations["write/direct"]
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

    def reads(self, files: Sequence[Path]) -> dict[str, Callable[[], object]]:
        """Reading files into the buffer, by name.  How fast that is depends on how the page cache holds them, so it is
        measured with the very files that are restored from."""
        reads: dict[str, Callable[[], object]] = {"read/1 thread": lambda: self._read(files, 1)}
        if self._threads > 1:
            reads[f"read/{self._threads} threads"] = lambda: self._read(files, self._threads)
        return reads

    def _read(self, files: Sequence[Path], threads: int) -> None:
        with ExitStack() as opened, ThreadPoolExecutor(threads) as pool:
            blocks: list[tuple[int, int, int]] = []
            for file in files:
                stream = opened.enter_context(open(file, "rb", buffering=0))
                size = os.fstat(stream.fileno()).st_size
                blocks += [(stream.fileno(), start, min(start + BLOCK, size)) for start in range(0, size, BLOCK)]
            # What files have beyond the state goes over the first bytes again.
            places = range(max(self._size // BLOCK, 1))
            list(pool.map(self._read_block, blocks, itertools.cycle(place * BLOCK for place in places)))

    def _read_block(self, block: tuple[int, int, int], place: int) -> None:
        fd, start, stop = block
        into = self._buffer[place:][: stop - start]
        while into and (count := os.preadv(fd, [into], start)):
            into, start = into[count:], start + count
