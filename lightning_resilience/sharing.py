"""Who writes what: every piece of the state is given to one of the ranks that hold it, by rank 0 (see ``inventory``).

What is done is done to the numbers of all ranks at once: only what several ranks hold, and any of them may write, is
decided piece by piece.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint.planner import WriteItemType

from lightning_resilience.errors import SaveFailed
from lightning_resilience.inventory import COMMON, OWN, WHOLE, Holding, Inventory, Kind, Numbers, Share

SMALL = 4096
"""Bytes up to which what all ranks read is not worth spreading over several files."""


@dataclass
class GlobalPlan:
    """What each rank holds and gets to write, and the tied keys with the key they share."""

    holdings: Sequence[Holding]
    shares: list[Share]
    tied: dict[str, str]


def share_out(holdings: Sequence[Holding]) -> GlobalPlan:
    """Give every piece of the state to one rank, so that the files come out even.

    What only one rank holds is its to write.  What several hold goes to the one with the least to write so far,
    largest first, and is cut along its first dimension where one rank would get more than its even part.  Small things
    that all read stay together, on the lowest rank.

    Args:
        holdings: of all ranks; those that hold the same have the very same inventory.

    Raises:
        SaveFailed: ranks that should hold the same do not.
    """
    world = len(holdings)
    inventories, which = _distinct(holdings)
    tied = _tied_everywhere(inventories)
    kinds = _Kinds(inventories, tied)
    held = _Held.of(holdings, which, kinds)
    places = _Places.of(held, kinds)

    first = places.first
    kind, size = held.kind[first], held.nbytes[first]
    by_all = places.count == world
    sharded = bool(np.any(~by_all))
    common = (by_all | kinds.is_one_number[kind]) & sharded
    several = (places.count > 1) & kinds.is_replicated[kind] & ~(common & (size <= SMALL))
    shared = np.flatnonzero(several)
    _check_alike(held, kinds, places, shared)

    alone = first[~several]
    own = np.zeros(len(held.rank), np.uint8)
    own[alone] = np.where(common[~several], COMMON, OWN)
    load = np.zeros(world, np.int64)
    np.add.at(load, held.rank[alone], held.nbytes[alone])
    largest_first = shared[np.argsort(-size[shared], kind="stable")]
    parts = _deal(held, places, largest_first, load, by_all & sharded)
    shares = [
        Share(of_rank, np.array(parts[rank], np.int64).reshape(-1, 4))
        for rank, of_rank in enumerate(np.split(own, held.begins[1:]))
    ]
    return GlobalPlan(holdings, shares, tied)


def _deal(
    held: _Held, places: _Places, order: Numbers, load: Numbers, common: NDArray[np.bool_]
) -> list[list[tuple[int, int, int, int]]]:
    """Give places away one after the other; for each rank rows as in ``Share.parts``.

    Args:
        held: what there is.
        places: where it lies.
        order: which of them to deal.
        load: bytes that each rank has to write so far; counted on.
        common: for each place, whether all ranks read it.
    """
    parts: list[list[tuple[int, int, int, int]]] = [[] for _ in load]
    nbytes = held.nbytes[places.first]
    even = max(math.ceil((int(load.sum()) + int(nbytes[order].sum())) / len(load)), 1)
    for place in order.tolist():
        holders = places.holders(place)
        ranks, items = held.rank[holders], held.item[holders]
        size, rows = int(nbytes[place]), int(held.rows[places.first[place]])
        for start, stop in _cut(size, rows, even):
            least = int(load[ranks].argmin())
            rank = int(ranks[least])
            parts[rank].append((int(items[least]), start, stop, bool(common[place])))
            load[rank] += size if stop == WHOLE else size // rows * (stop - start)
    return parts


def _distinct(holdings: Sequence[Holding]) -> tuple[list[Inventory], list[int]]:
    """The inventories, and which each rank has."""
    seen: dict[int, int] = {}
    which = [seen.setdefault(id(holding.inventory), len(seen)) for holding in holdings]
    return [holdings[which.index(number)].inventory for number in range(len(seen))], which


def _tied_everywhere(inventories: Sequence[Inventory]) -> dict[str, str]:
    """Keys that every rank with a part of them finds tied to the same key."""
    candidates = {key: first for inventory in inventories for key, first in inventory.tied.items()}
    return {
        key: first
        for key, first in candidates.items()
        if all(inventory.tied.get(key) == first or key in inventory.empty for inventory in inventories)
    }


class _Kinds:
    """The kinds of all inventories in a row, as columns.

    Attributes:
        keys: their keys.
        begins: the number of the first kind of each inventory.
        tensor: equal for the items of one tensor, whichever rank holds them.
        form: equal for tensors of the same dtype and size.
        itemsize: bytes of an element; 0 of objects.
        is_one_number: whether the whole tensor has one element.
        is_replicated: whether ranks that hold the same box of it hold the same values, as all of them say.
        is_empty: whether the whole tensor has no elements.
        is_left_out: whether it is stored under another key.
    """

    def __init__(self, inventories: Sequence[Inventory], tied: Collection[str]) -> None:
        kinds = [kind for inventory in inventories for kind in inventory.kinds]
        counts = [len(inventory.kinds) for inventory in inventories]
        differing = {
            kind.key for inventory in inventories for kind in inventory.kinds if kind.key not in inventory.identical
        }
        numel = [None if kind.size is None else math.prod(kind.size) for kind in kinds]
        tensors: dict[Any, int] = {}
        forms: dict[Any, int] = {}
        self.keys = [kind.key for kind in kinds]
        self.begins = list(itertools.accumulate(counts, initial=0))
        self.tensor = _column(tensors.setdefault((k.key, _depth(k)), len(tensors)) for k in kinds)
        self.form = _column(forms.setdefault((_dtype(k), k.size), len(forms)) for k in kinds)
        self.itemsize = _column(0 if k.properties is None else k.properties.dtype.itemsize for k in kinds)
        self.is_one_number = _column(n == 1 for n in numel).astype(bool)
        self.is_empty = _column(n == 0 for n in numel).astype(bool)
        self.is_replicated = _column(
            kind.type == WriteItemType.SHARD or kind.key not in differing for kind in kinds
        ).astype(bool)
        self.is_left_out = _column(k.key in tied for k in kinds).astype(bool)


def _column(values: Iterator[int]) -> Numbers:
    return np.fromiter(values, np.int64)


def _depth(kind: Kind) -> int | None:
    return None if kind.size is None else len(kind.size)


def _dtype(kind: Kind) -> torch.dtype | None:
    return None if kind.properties is None else kind.properties.dtype


@dataclass(frozen=True)
class _Held:
    """Every item of every rank in a row, by rank and then in the rank's order, as columns.

    Attributes:
        begins: where each rank's items begin.
        rank: who holds it.
        item: which of that rank's items it is.
        kind: the number of its kind.
        boxes: offsets and sizes.
        nbytes: bytes of its box.
        rows: size of its box in the first dimension.
    """

    begins: list[int]
    rank: Numbers
    item: Numbers
    kind: Numbers
    boxes: Numbers
    nbytes: Numbers
    rows: Numbers

    @classmethod
    def of(cls, holdings: Sequence[Holding], which: Sequence[int], kinds: _Kinds) -> _Held:
        counts = [len(holding.boxes) for holding in holdings]
        depth = max(holding.boxes.shape[2] for holding in holdings)
        item = np.concatenate([np.arange(count) for count in counts])
        rank = np.repeat(np.arange(len(counts)), counts)
        boxes = np.concatenate([_of_depth(holding.boxes, depth) for holding in holdings])
        kind = item + np.repeat(np.array(kinds.begins)[list(which)], counts)
        nbytes = boxes[:, 1].prod(axis=1) * kinds.itemsize[kind]
        rows = boxes[:, 1, 0] if depth else np.ones(len(item), np.int64)
        return cls(list(itertools.accumulate(counts[:-1], initial=0)), rank, item, kind, boxes, nbytes, rows)


def _of_depth(boxes: Numbers, depth: int) -> Numbers:
    """Boxes filled up to more dimensions."""
    missing = depth - boxes.shape[2]
    if not missing:
        return boxes
    zeros = np.zeros((len(boxes), 1, missing), np.int64)
    return np.concatenate([boxes, np.concatenate([zeros, zeros + 1], axis=1)], axis=2)


@dataclass(frozen=True)
class _Places:
    """The boxes that are to be written once, in the order in which ranks come to them, and who holds them.

    Attributes:
        sorted: numbers of items, those of one place together and by rank.
        start: where in them each place begins.
        count: how many ranks hold it.
    """

    sorted: Numbers
    start: Numbers
    count: Numbers

    @classmethod
    def of(cls, held: _Held, kinds: _Kinds) -> _Places:
        """A place is a tensor and offsets in it; a rank that has an empty part of a tensor does not hold any."""
        some = held.boxes[:, 1].prod(axis=1) > 0
        items = np.flatnonzero(~kinds.is_left_out[held.kind] & (some | kinds.is_empty[held.kind]))
        number = _numbered(kinds.tensor[held.kind[items]], held.boxes[items, 0])
        order = np.argsort(number, kind="stable")
        begins = np.flatnonzero(np.diff(number[order], prepend=-1))
        counts = np.diff(begins, append=len(order))
        by_first = np.argsort(order[begins])
        return cls(items[order], begins[by_first], counts[by_first])

    @cached_property
    def first(self) -> Numbers:
        """The item of the lowest rank that holds each place."""
        return self.sorted[self.start]

    def holders(self, place: int) -> Numbers:
        """The items of all ranks that hold a place, by rank."""
        return self.sorted[self.start[place] : self.start[place] + self.count[place]]


def _numbered(tensor: Numbers, offsets: Numbers) -> Numbers:
    """A number that is equal where the tensor and the offsets are: the tensors are lined up, each as large as its
    offsets ask for, and counted through."""
    tensors = int(tensor.max(initial=-1)) + 1
    volume = np.ones(tensors, np.int64)
    within = np.zeros(len(tensor), np.int64)
    for of_dimension in offsets.T:
        extent = np.zeros(tensors, np.int64)
        np.maximum.at(extent, tensor, of_dimension + 1)
        within = within * extent[tensor] + of_dimension
        volume *= extent
    return (np.cumsum(volume) - volume)[tensor] + within


def _check_alike(held: _Held, kinds: _Kinds, places: _Places, shared: Numbers) -> None:
    """Whether those who hold a place that any of them may write hold as much of the same tensor."""
    count = places.count[shared]
    within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    item = places.sorted[np.repeat(places.start[shared], count) + within]
    first = np.repeat(places.first[shared], count)
    differs = kinds.form[held.kind[item]] != kinds.form[held.kind[first]]
    differs |= np.any(held.boxes[item, 1] != held.boxes[first, 1], axis=1)
    for number in np.flatnonzero(differs)[:1].tolist():
        key, rank, lower = kinds.keys[held.kind[item[number]]], held.rank[item[number]], held.rank[first[number]]
        raise misfit(f"{key} is of another shape or dtype on rank {rank} than on rank {lower}")


def misfit(*what: str) -> SaveFailed:
    """For what no checkpoint can be made of."""
    return SaveFailed(f"The ranks' tensors do not fit together: {'; '.join(what)[:1000]}.", stage="plan")


def _cut(nbytes: int, rows: int, limit: int) -> Iterator[tuple[int, int]]:
    """Parts of at most ``limit`` bytes, where there are as many rows: the first row of each, and the one past its
    last."""
    count = min(rows, math.ceil(nbytes / limit)) if nbytes else 1
    if count <= 1:
        yield 0, WHOLE
        return
    yield from itertools.pairwise(rows * i // count for i in range(count + 1))
