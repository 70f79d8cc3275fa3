"""Bytes of a file straight into the memory of tensors, and the digest of the file on the way where it is wanted.

Without a digest only what is wanted is read, by several threads.  With it the whole file is, once, from its beginning
to its end, in blocks that are digested while they are in the processor's cache: what belongs to a large tensor in host
memory is read right there; small tensors, and those of a device, are filled from a block.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from lightning_resilience.errors import CheckpointCorrupt

DIRECT = 64 * 2**10
"""Bytes from which on a call to the kernel costs less than it spares."""
AT_ONCE = 16 * 2**20
"""Bytes of one call where there are several threads."""
BLOCK = 256 * 2**10
"""Bytes that are read, and then digested: as many as stay in a cache."""
MOST_THREADS = 4


class Span:
    """A tensor whose memory takes the bytes of a file from ``offset`` on as they are."""

    def __init__(self, target: Tensor, offset: int) -> None:
        self.target = target
        self.offset = offset
        self.size = target.nbytes
        self.end = offset + self.size
        """Where its bytes end in the file."""
        self.address = target.data_ptr()
        self.is_in_host_memory = target.device.type == "cpu"

    @property
    def is_read_in_place(self) -> bool:
        """Whether the kernel puts its bytes where they belong."""
        return self.size >= DIRECT and self.is_in_host_memory

    @property
    def memory(self) -> memoryview:
        return _memory(self.address, self.size)

    def take(self, block: Tensor, offset: int, count: int) -> None:
        """Take what is its own of the first ``count`` bytes of a block, which begins at ``offset`` in the file."""
        start, stop = max(self.offset, offset), min(self.end, offset + count)
        if self.is_in_host_memory:
            ctypes.memmove(self.address + start - self.offset, block.data_ptr() + start - offset, stop - start)
        else:
            own = self.target.view(-1).view(torch.uint8)
            own[start - self.offset : stop - self.offset].copy_(block[start - offset : stop - offset])


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


def fill(path: Path, spans: Sequence[Span]) -> None:
    """Fill tensors in host memory with bytes of one file.

    Raises:
        CheckpointCorrupt: it ends too early.
    """
    with open(path, "rb", buffering=0) as file:

        def read(span: Span, start: int) -> None:
            rest, offset = span.memory[start : start + AT_ONCE], span.offset + start
            while rest:
                done = os.preadv(file.fileno(), [rest], offset)
                if not done:
                    raise CheckpointCorrupt(f"{path} ends at byte {offset}, in the middle of a tensor.")
                rest, offset = rest[done:], offset + done

        parts = [(span, start) for span in spans for start in range(0, span.size, AT_ONCE)]
        threads = 1 if share_memory(spans) else threads_for(sum(span.size for span in spans) // AT_ONCE)

        def read_all(of_parts: Iterable[tuple[Span, int]]) -> None:
            for part in of_parts:
                read(*part)

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
    """
    in_order = sorted(spans, key=lambda span: span.offset)
    by_block = [span for span in in_order if not span.is_read_in_place]
    with open(path, "rb", buffering=0) as file:
        once = _Pass(file.fileno(), by_block)
        for span in in_order:
            if span.is_read_in_place:
                once.through_block(span.offset)
                once.into(span)
        once.through_block(sys.maxsize)
    torch.autograd.graph.increment_version([span.target for span in in_order])
    return once.digest


class _Pass:
    """One pass over a file, in which everything is digested.

    Args:
        fd: the file.
        by_block: what is filled from a block, in the order of the file.
    """

    def __init__(self, fd: int, by_block: Sequence[Span]) -> None:
        self._fd = fd
        self._by_block = deque(by_block)
        self._state = xxhash.xxh3_128()
        self._offset = 0
        # A device copies from locked memory at its full speed.
        is_locked = any(one.target.is_cuda for one in by_block)
        self._block = torch.empty(BLOCK, dtype=torch.uint8, device="cpu", pin_memory=is_locked)
        self._view = _memory(self._block.data_ptr(), BLOCK)

    @property
    def digest(self) -> str:
        """xxh3_128 of what has been read."""
        return self._state.hexdigest()

    def into(self, span: Span) -> None:
        """Read what comes next into a tensor; less of it where the file ends."""
        memory = span.memory
        while memory and (count := self._read(memory[:BLOCK])):
            memory = memory[count:]

    def through_block(self, until: int) -> None:
        """Read on until an offset, or to the end, and give what is filled from blocks its part of them."""
        while self._offset < until and (count := self._read(self._view[: until - self._offset])):
            begin = self._offset - count
            while self._by_block and self._by_block[0].offset < self._offset:
                self._by_block[0].take(self._block, begin, count)
                if self._by_block[0].end > self._offset:
                    break
                self._by_block.popleft()

    def _read(self, memory: memoryview) -> int:
        count = os.preadv(self._fd, [memory], self._offset)
        self._state.update(memory[:count])
        self._offset += count
        return count


def split_where_bytes_overlap(spans: Iterable[Span]) -> tuple[list[Span], list[Span]]:
    """Spans that have no bytes of the file in common, and the rest."""
    first: list[Span] = []
    rest: list[Span] = []
    for span in sorted(spans, key=lambda span: span.offset):
        (rest if first and span.offset < first[-1].end else first).append(span)
    return first, rest


def _memory(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")
