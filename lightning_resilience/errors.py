"""What can go wrong, as one tree.

::

    ResilienceError
    ├── CheckpointNotFound     (FileNotFoundError)  nothing of that name, or nothing at all
    ├── CheckpointUncommitted  (FileNotFoundError)  files are there, the manifest is not: the save never finished
    ├── CheckpointCorrupt      (OSError)            the manifest promises bytes that are not there
    ├── CheckpointIncompatible (ValueError)         whole, but for another model, format or purpose
    ├── CrashLoop              (RuntimeError)       every start crashes before it has a newer checkpoint
    ├── Diverged               (RuntimeError)       the loss left its course for good
    ├── SaveFailed             (RuntimeError)       a save was dropped; the earlier checkpoints are untouched
    ├── TierUnavailable        (OSError)            storage cannot be reached or written
    ├── TierDenied             (PermissionError)    storage refuses these credentials or this path
    └── SetupError             (ValueError)         arguments or a Trainer that cannot work together

Each inherits the builtin that people already catch, carries the values it speaks of as fields, and ends with a hint:
what to do, or to type, next.
"""

from __future__ import annotations


class ResilienceError(Exception):
    """Base of everything this package raises on purpose.

    Args:
        message: what happened, with the values involved.
        hint: what to do next; appended to the text and kept as ``.hint``.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        self.message = message
        self.hint = hint
        super().__init__(f"{message} {hint}" if hint else message)

    def __str__(self) -> str:
        return f"{self.message} {self.hint}" if self.hint else self.message


class CheckpointNotFound(ResilienceError, FileNotFoundError):
    """There is no checkpoint where one was asked for."""


class CheckpointUncommitted(ResilienceError, FileNotFoundError):
    """Files of a checkpoint exist but no manifest: its save did not finish, or it is being deleted."""


class CheckpointCorrupt(ResilienceError, OSError):
    """A committed checkpoint whose bytes differ from what its manifest names.

    Args:
        message: what happened.
        problems: one ``file: cause`` a damaged or missing file.
        hint: what to do next.
    """

    def __init__(self, message: str, *, problems: tuple[str, ...] = (), hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.problems = problems


class CheckpointIncompatible(ResilienceError, ValueError):
    """A whole checkpoint that does not fit: another model, an unknown format, weights only."""


class CrashLoop(ResilienceError, RuntimeError):
    """Starts from the newest checkpoint, and from the one before it, crash again and again: one more is of no use."""


class Diverged(ResilienceError, RuntimeError):
    """The loss left its course for good: as often as allowed, or with no good checkpoint to go back to."""


class SaveFailed(ResilienceError, RuntimeError):
    """A save did not become a checkpoint.

    Args:
        message: what happened.
        step: the global step that was being saved.
        rank: the rank that failed, or None where it is not one rank's fault.
        stage: where in the pipeline: ``plan``, ``stage``, ``persist`` or ``commit``.
        hint: what to do next.
    """

    def __init__(
        self, message: str, *, step: int = -1, rank: int | None = None, stage: str = "", hint: str = ""
    ) -> None:
        super().__init__(message, hint=hint)
        self.step = step
        self.rank = rank
        self.stage = stage


class TierUnavailable(ResilienceError, OSError):
    """A storage tier cannot be used now."""


class TierDenied(ResilienceError, PermissionError):
    """A storage tier refuses access."""


class SetupError(ResilienceError, ValueError):
    """Arguments that contradict each other, or a Trainer this package cannot serve."""
