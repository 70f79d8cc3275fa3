"""Tensors that are expanded views, several of whose elements are one place in memory: torch copies nothing into them.

What was saved of one has a value for each element.  As long as those that share a place have one value, it can be put
there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from lightning_resilience.errors import CheckpointIncompatible


def is_expanded(tensor: Tensor) -> bool:
    """Whether some of its elements are one place in memory, as ``Tensor.expand`` makes it."""
    if isinstance(tensor, (DTensor, ShardedTensor)) or tensor.layout != torch.strided:
        return False
    strides = tensor.stride()
    return 0 in strides and any(not step and size > 1 for step, size in zip(strides, tensor.shape, strict=True))


@torch.no_grad()
def copy_into(name: str, target: Tensor, value: Tensor) -> None:
    """Copy a value into a tensor of its shape, be that expanded or not.

    Args:
        name: of the tensor.
        target: the tensor.
        value: of the same shape.

    Raises:
        CheckpointIncompatible: elements of the value that have one place in the tensor are not the same.
    """
    if is_expanded(target):
        whole = value
        for dim, (step, size) in enumerate(zip(target.stride(), target.shape, strict=True)):
            if not step and size > 1:
                target, value = target.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
        if not torch.equal(_bytes(value.expand_as(whole)), _bytes(whole)):
            raise CheckpointIncompatible(
                f"{name} is an expanded view in the model: one value for several elements, which the checkpoint has"
                " different ones of.",
                hint="Make it a tensor of its own, with .clone().",
            )
    target.copy_(value)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


@contextmanager
def contiguous(module: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Let torch load into expanded parameters and buffers of a module, those of ``names``.

    Raises:
        CheckpointIncompatible: see ``copy_into``; on leaving.
    """
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    views = {name: tensor.data for name, tensor in own.items() if name in names and is_expanded(tensor)}
    for name, view in views.items():
        own[name].data = view.contiguous()
    try:
        yield
        for name, view in views.items():
            copy_into(name, view, own[name].data)
    finally:
        for name, view in views.items():
            own[name].data = view
