"""What the command line shows: tables, sizes, ages, progress; safe for any terminal."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import TextIO


class Meter:
    """Progress of long work: a bar that is drawn over itself on a terminal, a plain line now and then elsewhere.

    Args:
        total: bytes to do.
        stream: where to show it.
        done: what has been done to them, in a word.
        clock: seconds; monotonic.
    """

    BAR_SECONDS, LINE_SECONDS = 0.1, 10.0
    CELLS = 24
    SHORT = 0.0
    """Seconds in which nothing is shown: work that is done by then needs no bar."""

    def __init__(
        self, total: float, stream: TextIO, done: str = "done", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.total, self.stream, self.word, self.clock = total, stream, done, clock
        self.done = 0.0
        self.bar = stream.isatty()
        self.begun = self.shown = clock()

    def advance(self, count: float, what: str) -> None:
        """``count`` more is done; it was of ``what``."""
        self.done += count
        now = self.clock()
        if now - self.shown < (self.BAR_SECONDS if self.bar else self.LINE_SECONDS) or now - self.begun < self.SHORT:
            return
        self.shown = now
        share = min(self.done / self.total, 1.0) if self.total else 1.0
        text = f"{share:4.0%}  {self._how_far(now)}{clean(what)}"
        if self.bar:
            filled = round(share * self.CELLS)
            columns = shutil.get_terminal_size().columns
            line = fit(f"[{'#' * filled}{'-' * (self.CELLS - filled)}] {text}", columns - 1)
            self.stream.write(f"\r\x1b[K{line}")
        else:
            self.stream.write(f"{self.word} {text.strip()}\n")
        self.stream.flush()

    def _how_far(self, now: float) -> str:
        speed = human_size(self.done / max(now - self.begun, 1e-9))
        return f"{human_size(self.done)} of {human_size(self.total)}, {speed}/s  "

    def close(self) -> None:
        """Take the bar away."""
        if self.bar:
            self.stream.write("\r\x1b[K")
            self.stream.flush()


class Share(Meter):
    """Progress of what is not counted in bytes, as a share, once it has taken a second."""

    SHORT = 1.0

    def _how_far(self, now: float) -> str:
        return ""


@contextmanager
def doing(what: str, stream: TextIO) -> Iterator[None]:
    """Show what is going on while the block runs, on a terminal."""
    shown = stream.isatty()
    if shown:
        stream.write(f"\r\x1b[K{fit(clean(what), shutil.get_terminal_size().columns - 1)}")
        stream.flush()
    try:
        yield
    finally:
        if shown:
            stream.write("\r\x1b[K")
            stream.flush()


def table(
    rows: list[dict[str, str]], width: int | None, right: Sequence[str] = (), spare: Sequence[str] = ()
) -> Iterator[str]:
    """Rows under their keys, in columns; columns without any value are left out.

    Args:
        rows: one dict a row, all with the same keys; the first column is never shortened.  No rows, no table.
        width: columns of the terminal: columns are shortened to fit, the last ones first, or left out; None for no
            limit.
        right: keys of the columns that are aligned to the right.
        spare: keys of the columns that are shortened and left out, the first one first, before others are shortened.
    """
    if not rows:
        return
    cells = [{key: clean(value) for key, value in row.items()} for row in rows]
    used = [key for key in rows[0] if any(row[key] for row in cells)]
    widths = {key: max(len(key), *(len(row[key]) for row in cells)) for key in used}
    if width is not None:
        widths = _narrow(widths, width, spare)
    for row in ({key: key for key in widths}, *cells):
        texts = (
            fit(row[key], size).rjust(size) if key in right else fit(row[key], size).ljust(size)
            for key, size in widths.items()
        )
        yield "  ".join(texts).rstrip()


def _narrow(widths: dict[str, int], width: int, spare: Sequence[str]) -> dict[str, int]:
    """Shorten columns from the last one to the left, to ten characters at least, and leave some out where that is not
    enough: first of those that can be spared, then of all."""
    _, *others = widths
    for may_go in (
        [name for name in spare if name in others],
        [name for name in reversed(others) if name not in spare],
    ):
        for gone in range(len(may_go) + 1):
            left = {name: size for name, size in widths.items() if name not in may_go[:gone]}
            surplus = sum(left.values()) + 2 * (len(left) - 1) - width
            for name in [name for name in reversed(left) if name in may_go]:
                less = max(0, min(surplus, left[name] - 10))
                left[name] -= less
                surplus -= less
            if surplus <= 0:
                return left
        widths = left
    return widths


def fit(text: str, size: int) -> str:
    """``text``, or its beginning and an ellipsis where it is longer than ``size``."""
    return text if len(text) <= size else text[: max(size - 1, 0)] + "…"


def clean(text: str) -> str:
    """``text`` on one line and without control characters: a name must not redraw somebody's terminal."""
    return "".join(char if char.isprintable() else " " for char in text).rstrip()


def human_size(size: float) -> str:
    """Bytes for people: ``1.2 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def age(created: str, now: datetime) -> str:
    """How long ago ``created`` (as in the manifest) was, to one unit; ``created`` itself where that cannot be said."""
    try:
        then = datetime.strptime(created, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
    except ValueError:
        return created
    seconds = int((now - then).total_seconds())
    if seconds < 0:
        return created  # the clock that wrote it is ahead of ours
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"


def count_of(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
