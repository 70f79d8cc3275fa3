"""A checkpoint as one dict, whole and on the CPU, as stock Lightning has it in a single file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_resilience import trainer_state
from lightning_resilience.manifest import META
from lightning_resilience.named_optimizers import read_numbered
from lightning_resilience.reader import CheckpointReader


def read_whole(
    locate: Callable[[str], Path], *, trusted: bool, weights_only: bool | None = None, optimizers: bool = True
) -> dict[str, Any]:
    """The checkpoint as ``Strategy`` expects it, whatever strategy saved it.

    Args:
        locate: gives the path of a file of the checkpoint by its name.
        trusted: whether the digests of a manifest vouch for the files.
        weights_only: the user's wish, as ``torch.load`` takes it.
        optimizers: whether their state is wanted, too.

    Raises:
        CheckpointCorrupt, CheckpointIncompatible: it cannot be read.
    """
    reader = CheckpointReader(locate, plain=trusted, weights_only=weights_only)
    checkpoint = trainer_state.load(locate(META), weights_only, trusted=trusted)
    checkpoint["state_dict"] = reader.read_full()
    if optimizers and reader.optimizers:
        checkpoint["optimizer_states"] = [read_numbered(reader, index) for index in range(reader.optimizers)]
    return checkpoint
