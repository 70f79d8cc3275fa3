"""Which values can be saved: tensors that are nothing but memory of their own, and objects that are whole on each rank.

Every tensor is looked at, name by name, which takes longer than copying small ones.  So it is done at the first save,
which is to stop the run where there is something else, and wherever the shape of the state has changed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from lightning_resilience.errors import SaveFailed
from lightning_resilience.flat import PLAIN, FlatState, holds_parts


def check_saveable(flat: FlatState) -> None:
    """Look at every value of a state.

    Raises:
        SaveFailed: one cannot be saved; names it.
    """
    for key, value in zip(flat.keys, flat.values, strict=True):
        if (what := what_else(value)) is not None:
            raise SaveFailed(
                f"{key} is {what}, which cannot be saved.",
                stage="plan",
                hint="Keep it out of the state dict (persistent=False), or convert it in on_save_checkpoint.",
            )


def what_else(value: Any) -> str | None:
    """What a tensor is that is more, or less, than plain memory; None where there is nothing to say against it."""
    if isinstance(value, ShardedTensor):
        return next((what for shard in value.local_shards() if (what := what_else(shard.tensor))), None)
    if isinstance(value, DTensor):
        return what_else(value._local_tensor)
    if not isinstance(value, Tensor):
        return "an object with parts of sharded tensors in it" if holds_parts([value]) else None
    if isinstance(value, (UninitializedParameter, UninitializedBuffer)):
        return "a tensor without a shape yet"
    if value.is_nested:
        return "a nested tensor"
    if value.layout != torch.strided:
        return f"a {value.layout} tensor"
    if value.is_quantized:
        return "a quantized tensor"
    if value.is_meta:
        return "a tensor on the meta device"
    if type(value) not in PLAIN and value.numel() and not value.data_ptr():
        return f"a {type(value).__name__} without memory of its own (its values are in other tensors)"
    return None
