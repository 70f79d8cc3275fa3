"""``.metadata``: DCP's record of which piece of which tensor lies where, as any DCP reader expects it.

It grows with ranks times tensors, as the format has it, and is made behind the training.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import _validate_global_plan
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType

from lightning_resilience.flat import Path
from lightning_resilience.inventory import WHOLE, Holding, Numbers
from lightning_resilience.manifest import shard_file
from lightning_resilience.shards import in_order
from lightning_resilience.sharing import GlobalPlan, misfit


def metadata_bytes(plan: GlobalPlan, extents: Sequence[Numbers | Sequence[tuple[int, int]]]) -> bytes:
    """Content of ``.metadata``.

    Args:
        plan: what each rank holds and writes.
        extents: where each rank's layout put its pieces; see ``Layout.extents``.

    Raises:
        SaveFailed: the pieces overlap, stick out or leave gaps.
    """
    record = _Record()
    for rank, (holding, share) in enumerate(zip(plan.holdings, plan.shares, strict=True)):
        record.add(rank, holding, share.pieces(), np.array(extents[rank], np.int64).reshape(-1, 2))
    if errors := record.misfits or _misfits(record.entries, len(plan.holdings)):
        raise misfit(*errors)
    for key, first in plan.tied.items():
        record.tie(key, first)
    mappings = _mappings(plan.holdings)
    whole = Metadata(
        record.entries,
        planner_data={key: path for key, path in mappings.items() if key in record.entries},
        storage_data=record.positions,
        storage_meta=StorageMeta(),
        version=CURRENT_DCP_VERSION,
    )
    return pickle.dumps(whole)


class _Record:
    """What is written, rank by rank.

    Attributes:
        entries: what DCP knows of each key: its pieces in the order of ranks.
        positions: where each piece lies.
        misfits: keys that are more than one thing.
    """

    def __init__(self) -> None:
        self.entries: dict[str, Any] = {}
        self.positions: dict[MetadataIndex, _StorageInfo] = {}
        self.misfits: list[str] = []

    def add(self, rank: int, holding: Holding, pieces: Numbers, extents: Numbers) -> None:
        """The pieces of one rank, and their extents in the order of its files."""
        kinds = [holding.inventory.kinds[item] for item in pieces[:, 0].tolist()]
        indexes: list[MetadataIndex] = []
        for kind, (offsets, sizes), stop in zip(kinds, _cut(holding, pieces), pieces[:, 2].tolist(), strict=True):
            entry = self.entries.get(kind.key)
            if entry is not None and (
                not isinstance(entry, TensorStorageMetadata) or (kind.type != WriteItemType.SHARD and stop == WHOLE)
            ):
                self.misfits.append(f"{kind.key} is not the same on all ranks")
            if kind.properties is None or kind.size is None:
                self.entries[kind.key] = BytesStorageMetadata()
                indexes.append(MetadataIndex(kind.key))
                continue
            if not isinstance(entry, TensorStorageMetadata):
                entry = TensorStorageMetadata(kind.properties, torch.Size(kind.size), [])
                self.entries[kind.key] = entry
            depth = len(kind.size)
            chunk = ChunkStorageMetadata(torch.Size(offsets[:depth]), torch.Size(sizes[:depth]))
            indexes.append(MetadataIndex(kind.key, chunk.offsets, len(entry.chunks)))
            entry.chunks.append(chunk)
        common = pieces[:, 3].astype(bool).tolist()
        order = in_order(common, [kind.properties is None for kind in kinds])
        files = shard_file(rank), shard_file(rank, 1)
        for place, (offset, length) in zip(order, extents.tolist(), strict=True):
            self.positions[indexes[place]] = _StorageInfo(files[common[place]], offset, length)

    def tie(self, key: str, first: str) -> None:
        """Let a key be found where ``first`` is."""
        entry = self.entries[key] = self.entries[first]
        for number, chunk in enumerate(entry.chunks):
            index = MetadataIndex(key, chunk.offsets, number)
            self.positions[index] = self.positions[MetadataIndex(first, chunk.offsets)]


def _cut(holding: Holding, pieces: Numbers) -> list[tuple[list[int], list[int]]]:
    """Offsets and sizes of pieces, filled up to as many dimensions as there are."""
    boxes = holding.boxes[pieces[:, 0]]
    parts = np.flatnonzero(pieces[:, 2] != WHOLE)
    if len(parts):
        start, stop = pieces[parts, 1], pieces[parts, 2]
        boxes[parts, 0, 0] += start
        boxes[parts, 1, 0] = stop - start
    cut: list[tuple[list[int], list[int]]] = boxes.tolist()
    return cut


def _misfits(entries: dict[str, Any], world_size: int) -> list[str]:
    """What overlaps, sticks out or leaves gaps."""
    # Of the ranks' plans, it is asked how many there are.
    told: Any = _validate_global_plan([SavePlan([])] * world_size, Metadata(entries))
    if isinstance(told, bool):  # older torch logs which
        return [] if told else ["see the warnings of torch.distributed.checkpoint in the log"]
    errors: list[str] = told
    return errors


def _mappings(holdings: Sequence[Holding]) -> dict[str, Path]:
    """The names that lead to each key, as the lowest rank that has it says."""
    mappings: dict[str, Path] = {}
    for _, alike in itertools.groupby((holding.inventory for holding in reversed(holdings)), key=id):
        mappings.update(next(alike).mappings)
    return mappings
