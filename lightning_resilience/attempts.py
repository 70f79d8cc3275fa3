"""How often a run was started from a checkpoint and crashed before it had a newer one.

A small file beside the checkpoints, which there is only between a start and what shows that the start was no crash: the
first commit, a regular end, a preemption.  Schedulers and ``torchrun --max-restarts`` start a crashed run again and
again; whether that is of any use only a memory that survives the crash can tell.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from lightning_resilience import store
from lightning_resilience.errors import CrashLoop
from lightning_resilience.tiers import LocalTier

log = logging.getLogger("lightning_resilience")

ATTEMPTS = ".attempts.json"
"""Name of the file: a JSON object with the number of starts by checkpoint name."""


def restarts_left() -> bool:
    """Whether the launcher of this process starts it again on this machine if it fails."""
    try:
        return int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < int(os.environ["TORCHELASTIC_MAX_RESTARTS"])
    except (KeyError, ValueError):
        return False


class Attempts:
    """The starts from the checkpoints of one folder; kept by rank 0.

    Args:
        folder: the run folder.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / ATTEMPTS
        self._before: dict[str, int] | None = None

    def read(self) -> dict[str, int]:
        """Starts that have not come to anything, by checkpoint; none where the file is damaged, which is no reason not
        to start."""
        try:
            content = json.loads(self.path.read_bytes())
            return {str(name): int(count) for name, count in content.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}

    def begin(self, name: str, passed_over: Collection[str] = ()) -> None:
        """Count a start from ``name``, durably, before anything of it is loaded.

        Args:
            name: of the checkpoint.
            passed_over: newer ones, whose counts stay; others are forgotten.
        """
        before = self.read()
        self._before = {one: count for one, count in before.items() if one == name or one in passed_over}
        self._write({**self._before, name: before.get(name, 0) + 1})

    def forgive(self) -> None:
        """What ended this start was no crash: it does not count."""
        if self._before is not None:
            self._write(self._before)
            self._before = None

    def clear(self) -> None:
        """This start has come to something: nothing counts any more."""
        if self._before is not None:
            self._write({})
            self._before = None

    def _write(self, counts: dict[str, int]) -> None:
        fresh = self.path.with_name(f"{ATTEMPTS}.{os.getpid()}")
        try:
            if not counts:
                self.path.unlink(missing_ok=True)
                return
            with open(fresh, "w") as file:
                json.dump(counts, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(fresh, self.path)
        except OSError as error:
            log.warning("event=attempts path=%s error=%r", self.path, error)


Tried = Mapping[tuple[int, str], str]
"""Why a run is not to be started from a checkpoint once more, by number of the folder and name."""


def tried_in_vain(folders: Sequence[LocalTier], most: float) -> dict[tuple[int, str], str]:
    """The checkpoints that at least ``most`` starts have crashed from; see ``Tried``."""
    tried = {
        (index, name): f"{count} starts from it crashed before there was a newer one"
        for index, tier in enumerate(folders)
        for name, count in Attempts(tier.root).read().items()
        if count >= most and tier.exists(name)
    }
    for (_, name), why in tried.items():
        log.warning("event=resume skipped=%s reason=%r", name, why)
    return tried


def crash_loop(folders: Sequence[LocalTier], tried: Tried) -> CrashLoop:
    """What to tell people where there is nothing left to try."""
    tier = folders[min(index for index, _ in tried)]
    return CrashLoop(
        f"The run crashes again and again: {'; '.join(f'{name}: {why}' for (_, name), why in tried.items())}.",
        hint="Mend what the log of the last start shows, then remove"
        f" {str(Attempts(tier.root).path)!r} to have them tried again, or give ckpt_path= the checkpoint to go on from."
        f" {store.available(tier)}",
    )
