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
from typing import Any, TypedDict

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler, Sampler
from torch.utils.data import SequentialSampler as InOrder


class _Dealing(TypedDict):
    ranks: int
    batch_size: int | None
    """Samples in a batch of one rank; None for a loader that does not say."""
    drop_last: bool | None
    """Whether a batch that is not full is left out."""


class Share(_Dealing, total=False):
    """How an order is dealt; on disk, as a part of each rank's position."""

    workers: int
    """Of iterable data alone: the workers, which share it out among themselves."""


class Distributed(TypedDict):
    """What a ``DistributedSampler`` draws its order from."""

    shuffle: bool
    seed: int
    epoch: int


class _Sampler(TypedDict):
    type: str
    """Name of its class."""
    epoch: int | None
    """The one that it was told of; None where it cannot be told."""


class Base(_Sampler, total=False):
    """What a sampler of one process is, so that one like it can be found or made."""

    length: int
    """Of torch's own: how many indices there are to choose from."""
    replacement: bool
    """Of a random one, as are those below: whether an index may come again."""
    samples: int
    """How many indices it gives."""
    own_generator: bool
    """Whether it has a generator of its own."""


class Order(TypedDict):
    """How the order of an epoch is drawn again; on disk, as a part of each rank's position."""

    distributed: Distributed | None
    """What deals it to the ranks; None where one process has all of it."""
    base: Base | None
    """The user's sampler; None where what deals it draws it too."""
    length: int
    """Samples of an epoch, over all ranks."""
    samples: int | None
    """Samples that the data have."""


def share_of(loader: Any, ranks: int) -> Share:
    """How a loader deals its samples to so many ranks."""
    share: Share = {
        "ranks": ranks,
        "batch_size": getattr(loader, "batch_size", None),
        "drop_last": getattr(loader, "drop_last", None),
    }
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
        own = user_sampler(sampler)
        return {
            "distributed": {"shuffle": sampler.shuffle, "seed": sampler.seed, "epoch": sampler.epoch},
            "base": None if own is sampler else _base_of(own),
            "length": len(sampler.dataset),
            "samples": samples,
        }
    if ranks > 1:
        return None
    return {"distributed": None, "base": _base_of(sampler), "length": len(sampler), "samples": samples}


def kind_of(order: Order) -> tuple[object, ...]:
    """What two orders of one loader, in two epochs, have in common."""
    base, distributed = order["base"], order["distributed"]
    how = (None, None) if distributed is None else (distributed["shuffle"], distributed["seed"])
    return order["length"], None if base is None else base["type"], *how


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
        base = torch.tensor(list(sampler), dtype=torch.int64, device="cpu")
    distributed = order["distributed"]
    if distributed is None:
        return base
    if distributed["shuffle"]:
        generator = torch.Generator().manual_seed(distributed["seed"] + distributed["epoch"])
        places = torch.randperm(order["length"], generator=generator, device="cpu")
    else:
        places = torch.arange(order["length"], device="cpu")
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
    whole, rest = divmod(len(part), _batch_size(share))
    return whole + (1 if rest and not share["drop_last"] else 0)


def of_all_ranks(share: Share) -> int:
    """Samples in one batch of all ranks together."""
    return share["ranks"] * _batch_size(share)


def _batch_size(share: Share) -> int:
    size = share["batch_size"]
    assert size is not None  # nothing is dealt where it is not known
    return size


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
        size = _batch_size(self._share)
        for number in range(self._skip, batches(part, self._share)):
            yield part[number * size : (number + 1) * size].tolist()

    def __len__(self) -> int:
        return batches(self._part, self._share) if self._part is not None else len(self._then)  # type: ignore[arg-type]


# -- the sampler below -----------------------------------------------------------------------------------------------


def user_sampler(sampler: Any) -> Any:
    """The user's own sampler, without Lightning's wrapper for several ranks."""
    return getattr(sampler.dataset, "_sampler") if isinstance(sampler, DistributedSamplerWrapper) else sampler  # noqa: B009


def _base_of(sampler: Any) -> Base:
    """What a sampler is, so that one like it can be found or made."""
    found: Base = {"type": type(sampler).__name__, "epoch": getattr(sampler, "epoch", None)}
    if type(sampler) is RandomSampler:
        found["replacement"] = sampler.replacement
        found["samples"] = sampler.num_samples
        found["length"] = len(sampler.data_source)
        found["own_generator"] = sampler.generator is not None
    if type(sampler) is InOrder:
        found["length"] = len(sampler.data_source)
    return found


def _base(saved: Base, loader: Any) -> Iterable[int] | None:
    """A sampler like the one that was."""
    if saved["type"] == InOrder.__name__:
        return range(saved["length"])
    if saved["type"] == RandomSampler.__name__:
        generator = loader.generator if saved["own_generator"] else None
        if saved["own_generator"] and generator is None:
            return None
        return RandomSampler(range(saved["length"]), saved["replacement"], saved["samples"], generator)
    live = user_sampler(loader.sampler)
    if type(live).__name__ != saved["type"]:
        return None
    if saved["epoch"] is not None and callable(getattr(live, "set_epoch", None)):
        live.set_epoch(saved["epoch"])
    return live  # type: ignore[no-any-return]
