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
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_resilience.expanded import copy_into
from lightning_resilience.names import canonical
from lightning_resilience.saveable import what_else

RankState = dict[str, Any]

LARGEST_OWN_BUFFER = 2**20
"""Bytes.  Larger buffers (masks, tables) are taken to be the same on all ranks."""


def capture(*, cuda: bool = True) -> RankState:
    """The generators of this process as they are now: Python, NumPy, torch on the CPU and on its CUDA device.

    Other devices are left alone: asking for their state would put a context of this process on each of them.  So
    is CUDA where this process has not used it so far: after that, loader workers that are forked could not.

    Args:
        cuda: whether this process may use CUDA; a forked loader worker may not.
    """
    uses_cuda: bool = cuda and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return {
        "python": random.getstate(),
        "numpy": _numpy_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if uses_cuda else None,
    }


def restore(state: RankState) -> None:
    """Put the generators back to where ``capture`` saw them."""
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    _restore_numpy(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _numpy_state() -> tuple[Any, ...] | dict[str, Any]:
    """In plain values: of the Mersenne Twister its five, of another bit generator what it has."""
    state: Any = np.random.get_state(legacy=False)
    kind = state["bit_generator"]
    if kind != "MT19937":
        return cast("dict[str, Any]", plain(state))
    keys, position = state["state"]["key"], state["state"]["pos"]
    return kind, torch.from_numpy(keys.astype(np.int64)), int(position), int(state["has_gauss"]), float(state["gauss"])


def plain(value: Any) -> Any:
    """A state of one of NumPy's generators, without arrays and NumPy's own numbers."""
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, np.ndarray):
        return [int(number) for number in value]
    return value if isinstance(value, (str, float)) else int(value)


def _restore_numpy(state: Any) -> None:
    if isinstance(state, dict):
        live: Any = np.random.get_state(legacy=False)
        if live["bit_generator"] != state["bit_generator"]:
            rank_zero_warn(
                f"NumPy's bit generator was {state['bit_generator']} and is another one now: its numbers do not go on."
                " Call np.random.set_bit_generator before fit, as in the run that is resumed."
            )
            return
        np.random.set_state(state)
        return
    kind, keys, position, has_gauss, cached_gaussian = state
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached_gaussian))


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
