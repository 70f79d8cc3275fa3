"""A Trainer's checkpoint dict: its tensors, which go to shard files, and the rest, which goes to ``meta.pt``."""

from __future__ import annotations

import io
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch import Trainer

from lightning_resilience._version import __version__
from lightning_resilience.errors import CheckpointCorrupt, SaveFailed
from lightning_resilience.ranks import attempt
from lightning_resilience.trusted import load_trusted

VERSIONS = {"torch": torch.__version__, "lightning": lightning.__version__, "lightning_resilience": __version__}


def step_of(trainer: Trainer) -> int:
    """How far training is: in optimizer steps, or in batches where manual optimization leaves those uncounted."""
    return trainer.global_step or int(trainer.fit_loop.epoch_loop.batch_progress.total.ready)


def position_of(trainer: Trainer) -> tuple[int, int]:
    """The step boundary training is at; batches count where manual optimization leaves the step alone."""
    return trainer.global_step, trainer.fit_loop.epoch_loop.batch_progress.total.ready


def split(checkpoint: Mapping[str, Any], prefix: str = "model") -> tuple[dict[str, Any], dict[str, Any]]:
    """Separate what DCP stores from the rest; the checkpoint is left as it is.

    Args:
        checkpoint: as ``Trainer.save_checkpoint`` makes it.
        prefix: first component of the model's keys.
    """
    rest = dict(checkpoint)
    state = {prefix: rest.pop("state_dict")}
    for index, optimizer in enumerate(rest.pop("optimizer_states", [])):
        state[f"optimizer_{index}"] = optimizer
    return state, rest


def dump(rest: Mapping[str, Any]) -> bytes:
    """Serialise what is not for DCP, so that it is what it was now whatever the Trainer does next.

    Raises:
        SaveFailed: something in it cannot be pickled; names the entries.
    """
    buffer = io.BytesIO()
    try:
        torch.save(dict(rest), buffer)
    except Exception as error:
        culprits = [key for key, value in rest.items() if isinstance(attempt(partial(_pickle, value)), Exception)]
        raise SaveFailed(
            f"The Trainer's state cannot be serialised: {type(error).__name__}: {error}"
            f" (in {', '.join(map(repr, culprits)) or 'all of it together'}).",
            stage="stage",
            hint="Keep such objects out of hparams, callback state and on_save_checkpoint.",
        ) from error
    return buffer.getvalue()


def _pickle(value: Any) -> None:
    torch.save(value, io.BytesIO())


def check_loads(meta: bytes) -> None:
    """Find out now, not at the resume after days of training, that the state cannot be read back.

    Raises:
        SaveFailed: it cannot.
    """
    try:
        load_trusted(meta)
    except Exception as error:
        raise SaveFailed(
            f"The Trainer's state was serialised but cannot be read back: {type(error).__name__}: {error}.",
            stage="stage",
            hint="Its classes must be importable when it is loaded; keep others out of hparams and callback state.",
        ) from error


def load(path: Path, weights_only: bool | None, *, trusted: bool) -> dict[str, Any]:
    """Content of ``meta.pt``.

    Args:
        path: where it is.
        weights_only: the user's wish.
        trusted: whether a manifest's digest vouches for it.  Without one torch's own default holds: tensors and plain
            values only, unless the user says ``weights_only=False``.

    Raises:
        CheckpointIncompatible: it holds other objects, and may not.
        CheckpointCorrupt: it is not a Trainer's state.
    """
    loaded = load_trusted(path.read_bytes(), weights_only if trusted else weights_only is not False)
    if not isinstance(loaded, dict):
        raise CheckpointCorrupt(f"{path} does not hold a Trainer's state but a {type(loaded).__name__}.")
    return loaded
