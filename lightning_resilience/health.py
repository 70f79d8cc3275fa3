"""Whether what is saved is sound: a checkpoint with a parameter that is not finite is kept, and never resumed from.

A loss or a gradient that is not finite leaves its mark on the parameters, or on the moments of an optimizer, with its
next step.  So these are looked at, where they lie already: in the slot, in the background, while it is written out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

PIECE = 2**15
"""Elements looked at at a time: as many as one thread does alone, so that the ones of training are left in peace."""
PIECES = 512
"""Pieces in one call, during which the interpreter's lock is free."""


def first_not_finite(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """The name of the first tensor with a NaN or an infinity in it; None where all are finite.

    Args:
        tensors: contiguous ones on the CPU, by name; integers are passed over.
    """
    for pieces in _batches(_pieces(tensors), PIECES):
        # A norm passes both on.  One too large for its type is looked at again.
        if torch.isfinite(get_total_norm([piece for _, piece in pieces])):
            continue
        for name, piece in pieces:
            if not torch.isfinite(piece).all():
                return name
    return None


def _pieces(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        if not tensor.is_floating_point():
            continue
        for piece in torch.split(tensor.view(-1), PIECE):
            yield name, piece.float() if piece.itemsize == 1 else piece


def _batches(items: Iterator[tuple[str, Tensor]], size: int) -> Iterator[list[tuple[str, Tensor]]]:
    while batch := list(itertools.islice(items, size)):
        yield batch
