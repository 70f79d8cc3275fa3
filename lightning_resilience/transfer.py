"""Content on its way to an object or from it: in parts, some of them under way at once, whole and checked at the end.

Whose error is whose is kept apart: what a caller's own ``read`` or ``write`` raises reaches that caller as it is, past
whatever translates or tries again the failures of a store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import xxhash

from lightning_resilience.errors import CheckpointCorrupt, TierUnavailable

PART = 32 * 2**20
"""Bytes sent or fetched by one request."""
MEMORY = 128 * 2**20
"""Bytes of parts that are under way at once; a part that is sent is held twice for a moment."""
MOST_PARTS = 9000
"""Parts of one object; S3 allows 10,000."""

Read = Callable[[int, int], bytes]
"""Gives ``length`` bytes from ``start``."""
Write = Callable[[int, bytes], object]
"""Takes a piece that begins at ``start``."""


@dataclass(frozen=True)
class Stat:
    """What a store says of an object: its ``size`` in bytes, and the ``digest`` it was put with, where it kept that."""

    size: int
    digest: str | None = None


class OfTheCaller(Exception):  # it carries an error rather than being one
    """What a caller's own ``read`` or ``write`` raised: not a failure of the store, and not to be tried again."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class Checked:
    """Reads content in order and makes sure, at the end, that it is what was meant."""

    def __init__(self, key: str, read: Read, digest: str) -> None:
        self._key = key
        self._read = read
        self._wanted = digest
        self._state = xxhash.xxh3_128()

    def __call__(self, start: int, length: int) -> bytes:
        try:
            data = self._read(start, length)
        except Exception as error:
            raise OfTheCaller(error) from error
        if len(data) != length:
            raise CheckpointCorrupt(f"{self._key} is shorter than it was.", problems=(f"{self._key}: truncated",))
        self._state.update(data)
        return data

    def check(self) -> None:
        """Raise CheckpointCorrupt where what was read has another digest."""
        if self._state.hexdigest() != self._wanted:
            raise CheckpointCorrupt(
                f"{self._key} has other content than was saved, so it is not sent on.",
                problems=(f"{self._key}: digest differs",),
            )


@contextmanager
def callers_errors() -> Iterator[None]:
    """Let the caller see what its own code raised."""
    try:
        yield
    except OfTheCaller as wrapped:
        raise wrapped.error from None


def in_parts(size: int, write: Write, read_part: Callable[[int, int, Write], None]) -> None:
    """Fetch all of an object, some of its parts at a time.

    Args:
        size: bytes.
        write: takes the pieces, in any order, from several threads.
        read_part: fetches the bytes from ``start`` to ``stop`` and hands them to what it is given to write with.
    """
    part, most = part_size(size)
    hand, starts = _handing(write), range(0, size, part)
    with callers_errors(), ThreadPoolExecutor(min(most, len(starts) or 1), "resilience-fetch") as pool:
        _make(pool, [partial(read_part, start, min(start + part, size), hand) for start in starts])


def _handing(write: Write) -> Write:
    """``write``, whose errors stay its own."""

    def hand(start: int, piece: bytes) -> None:
        try:
            write(start, piece)
        except Exception as error:
            raise OfTheCaller(error) from error

    return hand


def _make(pool: ThreadPoolExecutor, calls: Iterable[Callable[[], None]]) -> None:
    """Make all calls; once one fails, those that have not begun are left out."""
    futures = [pool.submit(call) for call in calls]
    try:
        for future in futures:
            future.result()
    except BaseException:
        for future in futures:
            future.cancel()
        raise


def part_size(size: int) -> tuple[int, int]:
    """Bytes of a part, and how many may be under way."""
    part = max(PART, -(-size // MOST_PARTS))
    return part, max(1, MEMORY // part)


def check_size(key: str, found: Stat | None, size: int) -> None:
    """Raise TierUnavailable where what was sent is not there, or not whole."""
    if found is None or found.size != size:
        has = "is not there" if found is None else f"has {found.size:,} bytes of {size:,}"
        raise TierUnavailable(f"{key} was sent, and {has}.")
