"""Unpickling what a digest vouches for."""

from __future__ import annotations

import io
import pickle
import re
from typing import Any

import torch

from lightning_resilience.errors import CheckpointIncompatible


def load_trusted(data: bytes, weights_only: bool | None = None) -> Any:
    """Unpickle what a manifest's digest vouches for: tensors and plain values only where that is all there is.

    Args:
        data: a ``torch.save`` stream.
        weights_only: the user's wish; True refuses other objects, None and False load them.

    Raises:
        CheckpointIncompatible: there are other objects and ``weights_only`` is True.
    """
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if weights_only:
            raise CheckpointIncompatible(
                f"The checkpoint holds objects that weights_only=True does not load: {_what_is_refused(error)}",
                hint="Pass weights_only=False if you trust the checkpoint, or register the type with "
                "torch.serialization.add_safe_globals.",
            ) from error
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def _what_is_refused(error: BaseException) -> str:
    unsupported = re.search(r"GLOBAL (\S+)", str(error))
    return f"{unsupported.group(1)}." if unsupported else str(error).splitlines()[0]
