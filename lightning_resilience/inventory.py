"""What a rank holds of a state, what it tells rank 0 of that, and what it gets to write.

::

    state ── flatten ──> items ──┬─ inventory: what they are ──> digest, compared by all ranks;
                                 │                               told once by those that have the same
                                 └─ boxes: where they lie ─────> rank 0, numbers only
                                                                   │ share out (see ``sharing``)
                 pieces to write <── own items, and a share <──────┘

Items are DCP's own, from its planner.  A rank's part of a sharded state differs from another's in where its boxes lie
and in little else, so that is all that most ranks tell.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from lightning_resilience.flat import FlatState, Path
from lightning_resilience.manifest import digest
from lightning_resilience.shards import Piece

Numbers: TypeAlias = NDArray[np.int64]

WHOLE = -1
"""In place of its last row: all of an item."""


# -- what a rank holds ------------------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """What DCP knows of an item, but for where its box lies; no ``properties`` and ``size`` of objects."""

    key: str
    type: WriteItemType
    properties: TensorProperties | None
    size: tuple[int, ...] | None


@dataclass(frozen=True)
class Inventory:
    """What a rank holds; many ranks have the same.

    Attributes:
        kinds: of its items.
        mappings: the names that lead to each key.
        identical: keys of plain tensors that other ranks hold identically, so that any may write them.
        tied: keys whose storage an earlier key has too, with that key.
        empty: keys where this rank cannot tell, as it has no part.
    """

    kinds: tuple[Kind, ...]
    mappings: dict[str, Path]
    identical: frozenset[str]
    tied: dict[str, str]
    empty: frozenset[str]

    @cached_property
    def digest(self) -> bytes:
        """Equal on ranks that hold the same."""
        parts = self.kinds, self.mappings, sorted(self.identical), self.tied, sorted(self.empty)
        return bytes.fromhex(digest(repr(parts).encode()))


@dataclass(frozen=True)
class Holding:
    """What a rank holds, and where it lies: for each item the offsets and the sizes of its box, filled up with 0 and 1
    to as many dimensions as any item has (items x 2 x dimensions)."""

    inventory: Inventory
    boxes: Numbers


@dataclass(frozen=True)
class LocalPlan:
    """What one rank could write: DCP's items, and the same as other ranks have to know it."""

    items: list[WriteItem]
    holding: Holding

    @classmethod
    def of(
        cls,
        items: list[WriteItem],
        mappings: dict[str, Path],
        *,
        identical: Collection[str] = (),
        tied: Mapping[str, str] | None = None,
        empty: Collection[str] = (),
    ) -> LocalPlan:
        """See ``Inventory``."""
        kinds = tuple(map(_kind_of, items))
        inventory = Inventory(kinds, mappings, frozenset(identical), dict(tied or {}), frozenset(empty))
        return cls(items, Holding(inventory, _boxes_of(items)))


def plan_locally(flat: FlatState, identical: Collection[str] = ()) -> LocalPlan:
    """What this rank could write.

    Args:
        flat: its state.
        identical: keys of plain tensors that all ranks hold bit for bit (data-parallel parameters and moments).  Other
            plain values may differ between ranks (batch-norm buffers do); the lowest rank's are the ones that count.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(flat.as_dict())
    tied, empty = flat.tied()
    items = planner.create_local_plan().items
    return LocalPlan.of(items, flat.outline.paths, identical=identical, tied=tied, empty=empty)


def _kind_of(item: WriteItem) -> Kind:
    data = item.tensor_data
    if data is None:
        return Kind(item.index.fqn, item.type, None, None)
    return Kind(item.index.fqn, item.type, data.properties, tuple(data.size))


def _boxes_of(items: Sequence[WriteItem]) -> Numbers:
    boxes = [((), ()) if item.tensor_data is None else _box(item.tensor_data.chunk) for item in items]
    depth = max((len(sizes) for _, sizes in boxes), default=0)
    rows = [
        ((*offsets, *(0,) * (depth - len(offsets))), (*sizes, *(1,) * (depth - len(sizes)))) for offsets, sizes in boxes
    ]
    return np.array(rows, np.int64).reshape(len(items), 2, depth)


def _box(chunk: ChunkStorageMetadata) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(chunk.offsets), tuple(chunk.sizes)


Told: TypeAlias = tuple[Inventory | None, Numbers]
"""What a rank tells rank 0 of its holding: no inventory where a lower rank has the same."""


def tell(holding: Holding, digests: Sequence[bytes | BaseException], rank: int) -> Told:
    """As ``rank``, which knows the digests of all inventories."""
    is_first = digests.index(holding.inventory.digest) == rank
    return holding.inventory if is_first else None, holding.boxes


def heard(digests: Sequence[bytes | BaseException], told: Sequence[Told]) -> list[Holding]:
    """As rank 0: what each rank holds."""
    inventories = {digest: inventory for digest, (inventory, _) in zip(digests, told, strict=True) if inventory}
    return [Holding(inventories[digest], boxes) for digest, (_, boxes) in zip(digests, told, strict=True)]


# -- what it gets to write --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Share:
    """What a rank gets to write.

    Attributes:
        own: for each of its items, 0 or what it is to write all of: ``OWN``, or ``COMMON`` where all ranks read it.
        parts: of items that several ranks hold; a row has the number of the item, the first of its rows, the one after
            the last or ``WHOLE``, and whether all ranks read it.
    """

    own: NDArray[np.uint8]
    parts: Numbers

    def pieces(self) -> Numbers:
        """All of it, in the form of ``parts``."""
        items = np.flatnonzero(self.own)
        own = np.zeros((len(items), 4), np.int64)
        own[:, 0], own[:, 2], own[:, 3] = items, WHOLE, self.own[items] == COMMON
        return np.concatenate([own, self.parts])


OWN, COMMON = 1, 2


def pieces_of(items: Sequence[WriteItem], share: Share) -> list[Piece]:
    """As the rank that has the items: what it will write."""
    return [
        Piece(_rows(items[item], start, stop), _base(items[item]), bool(common))
        for item, start, stop, common in share.pieces().tolist()
    ]


def _rows(item: WriteItem, start: int, stop: int) -> WriteItem:
    """A part of ``item`` along its first dimension."""
    data = item.tensor_data
    if stop == WHOLE or data is None:
        return item
    offsets = torch.Size((data.chunk.offsets[0] + start, *data.chunk.offsets[1:]))
    sizes = torch.Size((stop - start, *data.chunk.sizes[1:]))
    return WriteItem(
        index=MetadataIndex(item.index.fqn, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(ChunkStorageMetadata(offsets, sizes), data.properties, data.size),
    )


def _base(item: WriteItem) -> tuple[int, ...]:
    return () if item.tensor_data is None else tuple(item.tensor_data.chunk.offsets)
