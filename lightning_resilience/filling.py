"""Bytes of a file straight into the memory of tensors, and the digest of the file on the way where it is wanted.

Without a digest only what is wanted is read, by several threads.  With it the whole file is, once, from its beginning
to its end and nowhere else, in blocks that are digested while they are in the processor's cache: what belongs to a
large tensor in host memory is read right there; small tensors, and those of a device, are filled from a block, which
also tells where the next tensor begins.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from operator import attrgetter
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from lightning_resilience.errors import CheckpointCorrupt
from lightning_resilience.stored import Stored

DIRECT = 64 * 2**10
"""Bytes from which on a call to the kernel costs less than it spares."""
AT_ONCE = 16 * 2**20
"""Bytes of one call where there are several threads."""
BLOCK = 256 * 2**10
"""Bytes that are read, and then digested: as many as stay in a cache."""
MOST_THREADS = 4


class Span:
    """A tensor whose memory takes elements of a stored one, from byte ``within`` of them on, as they are."""

    def __init__(self, target: Tensor, stored: Stored, within: int = 0) -> None:
        self.target = target
        self.stored = stored
        self.within = within
        self.size = target.nbytes
        self.address = target.data_ptr()
        self.is_in_host_memory = target.device.type == "cpu"

    @property
    def offset(self) -> int:
        """Where its bytes begin in the file, once that is known."""
        assert self.stored.begin is not None
        return self.stored.begin + self.within

    @property
    def order(self) -> tuple[int, int]:
        """Sorts spans as they lie in the file."""
        return self.stored.at, self.within

    def is_clear_of(self, another: Span) -> bool:
        """Whether its bytes come after those of another one, which is before it in order."""
        if self.stored is another.stored:
            return self.within >= another.within + another.size
        return self.stored.at >= another.stored.end

    @property
    def is_read_in_place(self) -> bool:
        """Whether the kernel puts its bytes where they belong."""
        return self.size >= DIRECT and self.is_in_host_memory

    @property
    def memory(self) -> memoryview:
        return _memory(self.address, self.size)

    def take(self, start: int, block: Tensor) -> None:
        """Take a block of bytes, from its own byte ``start`` on."""
        if self.is_in_host_memory:
            ctypes.memmove(self.address + start, block.data_ptr(), block.nbytes)
        else:
            self.target.view(-1).view(torch.uint8)[start : start + block.nbytes].copy_(block)


def takes_bytes(source: Tensor, target: Tensor) -> bool:
    """Whether copying ``source`` to ``target`` is copying one run of bytes to another."""
    return (
        type(target) is Tensor
        and target.layout is torch.strided
        and target.dtype is source.dtype
        and target.shape == source.shape
        and target.is_contiguous()
        and source.is_contiguous()
        and not (target.is_conj() or target.is_neg() or target.is_inference())
    )


def threads_for(parts: int) -> int:
    """How many threads read ``parts`` parts."""
    return max(1, min(parts, len(os.sched_getaffinity(0)), MOST_THREADS))


def share_memory(spans: Iterable[Span]) -> bool:
    """Whether two spans have memory in common."""
    by_address = sorted(spans, key=lambda span: span.address)
    return any(one.address + one.size > another.address for one, another in itertools.pairwise(by_address))


def locate(path: Path, stored: Iterable[Stored]) -> None:
    """Find out where the elements of tensors begin in a file.

    Raises:
        CheckpointCorrupt: there is something else where one should be.
    """
    unknown = [one for one in stored if one.begin is None]
    if not unknown:
        return
    with open(path, "rb", buffering=0) as file:
        for one in unknown:  # a disk, or a server, is asked for all of them at once
            _advise(file.fileno(), os.POSIX_FADV_WILLNEED, one.at, one.head)
        for one in unknown:
            one.locate(os.pread(file.fileno(), one.head, one.at))


def fill(path: Path, spans: Sequence[Span]) -> None:
    """Fill tensors, of whatever device, with bytes of one file.

    Raises:
        CheckpointCorrupt: it ends too early, or there is something else where a tensor should be.
    """
    locate(path, {span.stored: None for span in spans})
    with open(path, "rb", buffering=0) as file:

        def read(rest: memoryview, offset: int) -> None:
            while rest:
                done = os.preadv(file.fileno(), [rest], offset)
                if not done:
                    raise CheckpointCorrupt(f"{path} ends at byte {offset}, in the middle of a tensor.")
                rest, offset = rest[done:], offset + done

        parts = [(span, start) for span in spans for start in range(0, span.size, AT_ONCE)]
        threads = 1 if share_memory(spans) else threads_for(sum(span.size for span in spans) // AT_ONCE)

        def read_all(of_parts: Iterable[tuple[Span, int]]) -> None:
            block: Tensor | None = None
            for span, start in of_parts:
                count = min(AT_ONCE, span.size - start)
                if span.is_in_host_memory:
                    read(span.memory[start : start + count], span.offset + start)
                    continue
                block = _block(AT_ONCE, [span]) if block is None else block
                read(_memory(block.data_ptr(), count), span.offset + start)
                span.take(start, block[:count])

        # In order, because what lies in one memory is filled in the order of the file.
        with ThreadPoolExecutor(threads, "resilience-read") as pool:
            list(pool.map(read_all, [parts[first::threads] for first in range(threads)]))
    torch.autograd.graph.increment_version([span.target for span in spans])


def fill_and_digest(path: Path, spans: Iterable[Span]) -> str:
    """Fill tensors, of whatever device, with bytes of one file; xxh3_128 of all of it.

    What the file has not got is not filled; its digest is another one then.

    Args:
        path: of the file.
        spans: have no bytes of it in common (see ``split_where_bytes_overlap``).

    Raises:
        CheckpointCorrupt: there is something else where a tensor should be.
    """
    in_order = sorted(spans, key=attrgetter("order"))
    with open(path, "rb", buffering=0) as file:
        _advise(file.fileno(), os.POSIX_FADV_SEQUENTIAL)
        once = _Pass(file.fileno(), in_order)
        for span in in_order:
            once.find(span.stored)
            once.into(span)
        once.to_the_end()
    torch.autograd.graph.increment_version([span.target for span in in_order])
    return once.digest


class _Pass:
    """One pass over a file, in which everything is digested.  What comes next is read into a *block*, or right to where
    it belongs.

    Args:
        fd: the file.
        spans: what is to be filled, in the order of the file.
    """

    def __init__(self, fd: int, spans: Sequence[Span]) -> None:
        self._fd = fd
        self._state = xxhash.xxh3_128()
        self._block = _block(BLOCK, spans)
        self._view = _memory(self._block.data_ptr(), BLOCK)
        self._begin = self._end = 0  # of the block in the file; up to its end everything is digested
        # What is read in place should not be in a block.
        self._stops = deque(span.stored.at + span.stored.head for span in spans if span.is_read_in_place)

    @property
    def digest(self) -> str:
        """xxh3_128 of what has been read."""
        return self._state.hexdigest()

    def find(self, stored: Stored) -> None:
        """Read on until it is known where the elements of a tensor begin."""
        if stored.begin is None:
            while self._end < stored.at + stored.head and self._read_block(keep=stored.at):
                pass
            head = slice(stored.at - self._begin, min(stored.at + stored.head, self._end) - self._begin)
            stored.locate(bytes(self._view[head]))

    def into(self, span: Span) -> None:
        """Read on until a tensor is filled, or the file ends."""
        offset, filled = span.offset, 0
        while filled < span.size:
            if offset + filled < self._end:
                start = offset + filled - self._begin
                block = self._block[start : min(start + span.size - filled, self._end - self._begin)]
                span.take(filled, block)
                filled += block.nbytes
            elif offset + filled == self._end and span.is_read_in_place:
                count = self._read(span.memory[filled : filled + BLOCK])
                self._begin = self._end
                filled += count
                if not count:
                    return
            elif not self._read_block():
                return

    def to_the_end(self) -> None:
        """Digest the rest of the file."""
        while self._read_block():
            pass

    def _read_block(self, keep: int = sys.maxsize) -> int:
        """Read what comes next into the block, in which the bytes from an offset on are kept; how much came."""
        kept = max(self._end - max(keep, self._begin), 0)
        if kept:
            last = self._end - self._begin
            ctypes.memmove(self._block.data_ptr(), self._block.data_ptr() + last - kept, kept)
        self._begin = self._end - kept
        while self._stops and self._stops[0] <= self._end:
            self._stops.popleft()
        room = min(BLOCK - kept, self._stops[0] - self._end) if self._stops else BLOCK - kept
        return self._read(self._view[kept : kept + room])

    def _read(self, memory: memoryview) -> int:
        count = os.preadv(self._fd, [memory], self._end)
        self._state.update(memory[:count])
        self._end += count
        return count


def split_where_bytes_overlap(spans: Iterable[Span]) -> tuple[list[Span], list[Span]]:
    """Spans that have no bytes of the file in common, and the rest."""
    first: list[Span] = []
    rest: list[Span] = []
    for span in sorted(spans, key=attrgetter("order")):
        (first if not first or span.is_clear_of(first[-1]) else rest).append(span)
    return first, rest


def _block(size: int, spans: Iterable[Span]) -> Tensor:
    """Memory for bytes on their way to tensors; locked for CUDA, which copies from that at full speed."""
    is_locked = any(span.target.is_cuda for span in spans)
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=is_locked)


def _advise(fd: int, advice: int, offset: int = 0, count: int = 0) -> None:
    """Tell the kernel what of a file will be read; all of it if ``count`` is 0."""
    with suppress(OSError):  # a file system may not care
        os.posix_fadvise(fd, offset, count, advice)


def _memory(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")
