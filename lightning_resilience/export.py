"""One file, as stock Lightning writes it, from a checkpoint of any strategy.

It is written beside its place under a name of its own, and put there once it is whole and lasts.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, cast

import torch

from lightning_resilience import durable
from lightning_resilience.console import human_size
from lightning_resilience.errors import CheckpointIncompatible, TierUnavailable
from lightning_resilience.housekeeping import check_target
from lightning_resilience.manifest import Manifest
from lightning_resilience.places import Source
from lightning_resilience.tiers import LocalTier
from lightning_resilience.watch import WATCHED
from lightning_resilience.whole import read_whole

TRAINING = ("optimizer_states", "lr_schedulers", "callbacks", "loops", WATCHED)
"""Parts of a checkpoint that only a ``fit`` wants, besides what a precision plugin keeps under its name."""


def read(tier: LocalTier, name: str, manifest: Manifest, *, weights_only: bool) -> dict[str, Any]:
    """A checkpoint that is whole, as stock Lightning has it in a file.

    Args:
        tier: where it is.
        name: its name there.
        manifest: what it is made of; all of it was verified.
        weights_only: whether to leave out what only training wants.

    Raises:
        CheckpointIncompatible: it holds objects of classes that cannot be imported here.
    """
    try:
        whole = read_whole(Source(tier, name, manifest).home, trusted=True, optimizers=not weights_only)
    except (ImportError, AttributeError) as error:
        raise CheckpointIncompatible(
            f"{tier.where(name)!r} holds an object whose class cannot be imported here: {error}.",
            hint="Run this where the code of the training can be imported: PYTHONPATH=path/to/it.",
        ) from error
    if not weights_only:
        return whole
    return {key: value for key, value in whole.items() if key not in TRAINING and not key.endswith("Precision")}


def write(checkpoint: dict[str, Any], file: Path, *, force: bool, tell: Callable[[int], None]) -> int:
    """Write a checkpoint as one file; its bytes.  What was there stays as it is until the new file is whole.

    Args:
        checkpoint: what goes into it.
        file: where.
        force: whether a file that is there gives way.
        tell: hears of bytes that are written.

    Raises:
        SetupError: there is something there by now.
        TierUnavailable: it cannot be written.
    """
    partial = file.with_name(f".{file.name}.{uuid.uuid4().hex[:12]}")
    try:
        with open(partial, "xb") as stream:
            counted = _Counted(stream, tell)
            try:
                torch.save(checkpoint, cast(IO[bytes], counted))
            except RuntimeError as error:
                raise counted.error or error from error  # torch reports that its writer failed, not why
            stream.flush()
            os.fsync(stream.fileno())
        check_target(file, force=force)
        os.replace(partial, file)
        durable.sync(file.parent)
    except OSError as error:
        raise TierUnavailable(
            f"{str(file)!r} cannot be written: {error.strerror or error}.",
            hint=f"It needs a folder that this user may write, with {human_size(size_of(checkpoint))} to spare.",
        ) from error
    finally:
        partial.unlink(missing_ok=True)
    return counted.size


class _Counted:
    """A stream for ``torch.save`` that counts, and remembers the error that stopped it."""

    def __init__(self, stream: IO[bytes], tell: Callable[[int], None]) -> None:
        self._stream, self._tell = stream, tell
        self.size = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            count = self._stream.write(data)
        except OSError as error:
            self.error = error
            raise
        self.size += count
        self._tell(count)
        return count

    def flush(self) -> None:
        self._stream.flush()


def size_of(checkpoint: dict[str, Any]) -> int:
    """About how large its file will be, in bytes."""
    return sum(value.nbytes for value in _tensors(checkpoint))


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return [tensor for value in values for tensor in _tensors(value)]
