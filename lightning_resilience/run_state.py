"""State that each rank has for itself: its random number generators, and buffers that ranks do not share.

It is saved one file a rank, because DCP keeps one copy of entries that share a key: two ranks' generators under one
name would come back as one rank's, for both.
"""

from __future__ import annotations

import io
import random
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
import xxhash

from lightning_resilience.expanded import copy_into
from lightning_resilience.names import canonical
from lightning_resilience.saveable import what_else

RankState = dict[str, Any]

LARGEST_OWN_BUFFER = 2**20
"""Bytes.  Larger buffers (masks, tables) are taken to be the same on all ranks."""


def capture(*, cuda: bool = True) -> RankState:
    """The generators of this process as they are now: Python, NumPy, torch on the CPU and on its CUDA device.

    Other devices are left alone: asking for their state would put a context of this process on each of them.

    Args:
        cuda: whether this process may use CUDA; a forked loader worker may not.
    """
    kind, keys, position, has_gauss, cached_gaussian = cast("tuple[str, Any, int, int, float]", np.random.get_state())
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached_gaussian)),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if cuda and torch.cuda.is_available() else None,
    }


def restore(state: RankState) -> None:
    """Put the generators back to where ``capture`` saw them."""
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    kind, keys, position, has_gauss, cached_gaussian = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached_gaussian))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


@contextmanager
def kept() -> Iterator[None]:
    """Put the generators back afterwards to where they are now."""
    now = capture()
    try:
        yield
    finally:
        restore(now)


def derive(base: bytes, step: int, rank: int) -> None:
    """Seed all generators for a rank that has no state of its own, because the number of ranks changed.

    Args:
        base: content of rank 0's saved state; the source of the run's randomness.
        step: the step that is resumed.
        rank: this rank; every rank gets a stream of its own, none gets rank 0's.
    """
    seed = xxhash.xxh64_intdigest(base + f"/{step}/{rank}".encode()) % 2**32
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def own_buffers(module: torch.nn.Module, saved: Container[str]) -> dict[str, torch.Tensor]:
    """Copies of the small buffers of a model, such as the statistics of a batch norm, which differ from rank to rank.

    The checkpoint has those of one rank, as stock checkpoints do.

    Args:
        module: the model.
        saved: names in its state dict; other buffers are not part of its state.
    """
    found = {canonical(name): buffer for name, buffer in module.named_buffers()}
    return {
        name: buffer.detach().to("cpu", copy=True)
        for name, buffer in found.items()
        if name in saved
        and type(buffer) is torch.Tensor
        and what_else(buffer) is None
        and buffer.nbytes <= LARGEST_OWN_BUFFER
    }


def restore_buffers(module: torch.nn.Module, saved: Mapping[str, torch.Tensor]) -> None:
    """Put the buffers back; one that has another shape now is left alone."""
    for name, buffer in module.named_buffers():
        value = saved.get(canonical(name))
        if value is not None and value.shape == buffer.shape:
            copy_into(name, buffer, value)


def to_bytes(state: RankState) -> bytes:
    """Serialise, so that it can be written later and is not what the generators go on to be."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()
