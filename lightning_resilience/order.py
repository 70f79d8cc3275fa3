"""The order of one epoch's samples over all ranks, and how what is left of it is dealt to ranks that are not the same.

With map-style data an epoch is a list of indices, drawn once: by a ``DistributedSampler`` from its seed and the epoch,
by a sampler of a single process from its random generators.  Rank r of N takes every N-th, from r on, in batches.  So
after n batches of b the first n·b·N are used up, and the others can be dealt to any number of ranks in batches of any
size, each exactly once.

====================================  ==============================================================================
loader                                on another number of ranks, or with another batch size, inside an epoch
====================================  ==============================================================================
``DataLoader``, map-style data        goes on at the same sample, in the same order
custom batch sampler, iterable data,  begins the epoch anew: what was left of it is not known to other ranks
loader with its own state, several
loaders, or one per rank that is not
distributed
====================================  ==============================================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler, Sampler
from torch.utils.data import SequentialSampler as InOrder

Order = dict[str, Any]
"""How the order of an epoch is drawn again; plain values."""

Share = dict[str, Any]
"""How an order is dealt: ``ranks``, ``batch_size`` and ``drop_last``, for an incomplete batch; for iterable data also
``workers``, which share it out among themselves."""


def share_of(loader: Any, ranks: int) -> Share:
    """How a loader deals its samples to so many ranks."""
    names = ("batch_size", "drop_last")
    share = {"ranks": ranks, **{name: getattr(loader, name, None) for name in names}}
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        share["workers"] = getattr(loader, "num_workers", 0)
    return share


def order_of(loader: Any, ranks: int) -> Order | None:
    """How the order of the running epoch is drawn again; None where that is not known."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    if type(loader.batch_sampler) is not BatchSampler:
        return None
    sampler: Any = loader.sampler
    if sized_len(sampler) is None:
        return None
    samples = sized_len(loader.dataset)
    if type(sampler) in (DistributedSampler, DistributedSamplerWrapper):
        distributed = {name: getattr(sampler, name) for name in ("shuffle", "seed", "epoch")}
        inner = _inner(sampler)
        length = len(sampler.dataset)
        return {
            "distributed": distributed,
            "base": None if inner is None else _base_of(inner),
            "length": length,
            "samples": samples,
        }
    if ranks > 1:
        return None
    return {"distributed": None, "base": _base_of(sampler), "length": len(sampler), "samples": samples}


def kind_of(order: Order) -> tuple[object, ...]:
    """What two orders of one loader, in two epochs, have in common."""
    base, distributed = order["base"] or {}, order["distributed"] or {}
    return order["length"], base.get("type"), distributed.get("shuffle"), distributed.get("seed")


def draw(order: Order, loader: Any) -> Tensor | None:
    """Draw an order again, with the generators as they were when it was drawn first.

    Args:
        order: from ``order_of``, of this run or an earlier one.
        loader: the training loader of today, whose sampler may be wrapped for more ranks, or not.

    Returns:
        Indices, shape ``(length,)``; None where the loader has another sampler now.
    """
    base = None
    if order["base"] is not None:
        sampler = _base(order["base"], loader)
        if sampler is None:
            return None
        base = torch.tensor(list(sampler), dtype=torch.int64)
    distributed = order["distributed"]
    if distributed is None:
        return base
    if distributed["shuffle"]:
        generator = torch.Generator().manual_seed(distributed["seed"] + distributed["epoch"])
        places = torch.randperm(order["length"], generator=generator)
    else:
        places = torch.arange(order["length"])
    return places if base is None else base[places]


def deal(left: Tensor, rank: int, share: Share, *, drop_uneven: bool) -> Tensor:
    """One rank's part of what is left.

    Args:
        left: indices, in their order.
        rank: of ``share["ranks"]``.
        share: see ``Share``.
        drop_uneven: whether samples that do not come out even are dropped, rather than some given out twice, as
            ``DistributedSampler`` does.
    """
    ranks = share["ranks"]
    uneven = len(left) % ranks
    if uneven and drop_uneven:
        left = left[: len(left) - uneven]
    elif uneven:
        missing = ranks - uneven
        left = torch.cat([left, left.repeat(-(-missing // len(left)))[:missing]])
    return left[rank::ranks]


def batches(part: Tensor, share: Share) -> int:
    """How many batches one rank's part makes."""
    whole, rest = divmod(len(part), int(share["batch_size"]))
    return whole + (1 if rest and not share["drop_last"] else 0)


class Dealt(Sampler[list[int]]):
    """A batch sampler over one rank's part.

    Args:
        part: indices.
        share: see ``Share``.
        skip: how many batches are passed over.
        then: the batch sampler of the epochs after this one, for workers that persist.
    """

    def __init__(self, part: Tensor, share: Share, skip: int, then: Iterable[list[int]] = ()) -> None:
        self._part: Tensor | None = part
        self._share = share
        self._skip = skip
        self._then = then

    def __iter__(self) -> Iterator[list[int]]:
        part, self._part = self._part, None
        if part is None:
            yield from self._then
            return
        size = self._share["batch_size"]
        for number in range(self._skip, batches(part, self._share)):
            yield part[number * size : (number + 1) * size].tolist()

    def __len__(self) -> int:
        return batches(self._part, self._share) if self._part is not None else len(self._then)  # type: ignore[arg-type]


# -- the sampler below -----------------------------------------------------------------------------------------------


def _inner(sampler: Any) -> Any:
    """The user's sampler inside Lightning's wrapper for several ranks."""
    return getattr(sampler.dataset, "_sampler") if isinstance(sampler, DistributedSamplerWrapper) else None  # noqa: B009


def _base_of(sampler: Any) -> dict[str, Any]:
    """What a sampler is, so that one like it can be found or made."""
    found: dict[str, Any] = {"type": type(sampler).__name__, "epoch": getattr(sampler, "epoch", None)}
    if type(sampler) is RandomSampler:
        found |= {
            "replacement": sampler.replacement,
            "samples": sampler.num_samples,
            "length": len(sampler.data_source),
        }
        found["own_generator"] = sampler.generator is not None
    if type(sampler) is InOrder:
        found["length"] = len(sampler.data_source)
    return found


def _base(saved: dict[str, Any], loader: Any) -> Iterable[int] | None:
    """A sampler like the one that was."""
    if saved["type"] == InOrder.__name__:
        return range(saved["length"])
    if saved["type"] == RandomSampler.__name__:
        generator = loader.generator if saved["own_generator"] else None
        if saved["own_generator"] and generator is None:
            return None
        return RandomSampler(range(saved["length"]), saved["replacement"], saved["samples"], generator)
    live = _inner(loader.sampler) or loader.sampler
    if type(live).__name__ != saved["type"]:
        return None
    if saved["epoch"] is not None and callable(getattr(live, "set_epoch", None)):
        live.set_epoch(saved["epoch"])
    return live  # type: ignore[no-any-return]
