"""How a save ends: the same verdict on every rank, whatever happens to any of them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lightning_resilience.errors import ResilienceError, SaveFailed
from lightning_resilience.manifest import META, METADATA, FileEntry, Manifest, Outline
from lightning_resilience.ranks import Board, Ranks, portable


@dataclass(frozen=True)
class Report:
    """One rank's part of a save: its ``files``, and what in it is not finite, if anything is (``unsound``)."""

    files: list[FileEntry]
    unsound: str | None = None


class Verdict:
    """What the ranks tell each other about one save, in the order of the methods.

    Every key is written once, with its value or with the failure that made it impossible, so that a wait is for one
    key only.  ``reports`` is where it is decided, in one atomic write: the last rank to report lets the save go on, the
    first one to fail or to run out of time drops it.  Once it goes on, only rank 0 can still drop it, and the others
    wait for its word without a deadline, because their files may be part of a checkpoint by then.

    Args:
        board: a connection of this thread's own.
        prefix: of the keys of this save.
        ranks: who takes part.
        leaders: which ranks commit a folder.
        timeout: seconds until the save is dropped.
    """

    def __init__(self, board: Board, prefix: str, ranks: Ranks, leaders: Sequence[int], timeout: float) -> None:
        self._board = board
        self._prefix = prefix
        self._rank = ranks.rank
        self._world_size = ranks.world_size
        self._leaders = leaders
        self._leads = ranks.rank in leaders
        self._reported = False
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, (self._prefix, *parts)))

    def _put(self, value: object, *parts: object) -> Any:
        """Write a key, unless somebody was first; what stands there now."""
        return self._board.put_once(self._key(*parts), value)

    def _wait(self, *parts: object, deadline: float | None = None) -> Any:
        """The value of a key; raises the failure that stands in its place, or one without a rank when time is up."""
        try:
            left = (self._deadline if deadline is None else deadline) - time.monotonic()
            value = self._board.wait(self._key(*parts), left)
        except TimeoutError as error:
            raise SaveFailed(
                f"Not every rank finished its part of the save within {self._timeout:.0f} s{self._late()}.",
                stage="commit",
                hint="Raise save_timeout= if the storage is that slow.",
            ) from error
        if isinstance(value, BaseException):
            raise value
        return value

    def _late(self) -> str:
        with suppress(Exception):
            late = [str(rank) for rank in range(self._world_size) if not self._board.has(self._key("files", rank))]
            return f" (rank {', '.join(late)})" if late and self._world_size > 1 else ""
        return ""

    def name(self, name: str) -> None:
        self._put(name, "name")

    def wait_name(self) -> str:
        return str(self._wait("name"))

    def report(self, report: Report) -> None:
        self._reported = True
        self._put(report, "files", self._rank)
        if self._board.count(self._key("count")) == self._world_size:
            self._put(True, "reports")

    def wait_reports(self) -> None:
        try:
            self._wait("reports")
        except SaveFailed as error:
            if error.rank is not None:
                raise
            stands = self._put(self._signed("commit", error), "reports")
            if isinstance(stands, BaseException):
                raise stands from error

    def reports(self) -> list[Report]:
        """What the ranks reported, once all have."""
        keys = [self._key("files", rank) for rank in range(self._world_size)]
        return self._board.wait_all(keys, self._deadline - time.monotonic())

    def hand_over(self, manifest: Manifest, files: Mapping[str, bytes]) -> None:
        """As rank 0: what the other leaders put into their folders too."""
        for file, content in files.items():
            self._put(content, "copy", file)
        metadata = manifest.file(METADATA)
        self._put((manifest.to_bytes(), metadata.xxh3_128 if metadata is not None else ""), "copies")

    def take_over(self) -> tuple[bytes, str]:
        """The content of the manifest, which is as long as there are ranks and not parsed for nothing, and the digest
        of ``.metadata``."""
        content, metadata = self._wait("copies")
        return content, metadata

    def copy(self, file: str) -> bytes:
        """One of the files that were handed over."""
        content: bytes = self._wait("copy", file)
        return content

    def folder_done(self) -> None:
        self._put(True, "folder", self._rank)

    def wait_folder(self, rank: int) -> None:
        self._wait("folder", rank)

    def commit(self, manifest: Manifest) -> None:
        self._put(manifest.outline(), "committed")

    def wait_commit(self) -> Outline:
        outline: Outline = self._wait("committed", deadline=math.inf)
        return outline

    def fail(self, stage: str, error: BaseException) -> tuple[BaseException, bool]:
        """Drop the save on all ranks, as far as this rank has a say in it still.

        Returns:
            The failure that all go by, and whether the save is dropped for certain.  It is not where the board is lost
            after this rank reported: rank 0 may have committed it.
        """
        is_verdict = isinstance(error, SaveFailed) and error.rank is not None
        if not is_verdict:
            error = self._signed(stage, error)
        try:
            stands = self._put(error, "reports")
            of_folder = self._put(error, "folder", self._rank) if self._leads else None
            for key in ("name", "copies", "committed") if self._rank == 0 else ():
                self._put(error, key)
        except Exception:
            return error, is_verdict or not self._reported
        if isinstance(stands, BaseException):
            return stands, True
        return error, is_verdict or (self._leads and isinstance(of_folder, BaseException))

    def _signed(self, stage: str, error: BaseException) -> BaseException:
        """The failure as the other ranks get to see it."""
        by = f"Rank {self._rank}: " if self._world_size > 1 else ""
        hint = getattr(error, "hint", "")
        stage = getattr(error, "stage", "") or stage
        return portable(SaveFailed(f"{by}{describe(error)}", rank=self._rank, stage=stage, hint=hint))

    def clear(self) -> None:
        """Take everything off the board; nobody asks for it any more."""
        of_ranks = [self._key("files", rank) for rank in range(self._world_size)]
        of_leaders = [self._key("folder", rank) for rank in self._leaders]
        copies = [self._key("copy", file) for file in (META, METADATA)] if len(self._leaders) > 1 else []
        single = map(self._key, ("name", "count", "reports", "copies", "committed"))
        with suppress(Exception):
            self._board.forget(*of_ranks, *of_leaders, *copies, *single)


def describe(error: BaseException) -> str:
    """What happened, in words."""
    if isinstance(error, ResilienceError):
        return error.message
    return f"{type(error).__name__}: {error}"
