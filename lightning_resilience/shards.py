"""Tensors to shard files: who writes which piece, and where in its file the piece lies.

::

    state ── flatten ──> local plan ──┐ one a rank, gathered
                                      ├─ share out ──> pieces of each rank ──> layout of its file ──┐ gathered
                                      │                                                             ├──> .metadata
                                      └─────────────────────────────────────────────────────────────┘

Planning speaks DCP's own types, so ``.metadata`` is what any DCP reader expects.  It is done once and kept until a
*fingerprint* (names, kinds, dtypes, shapes, placements, tied storages) changes on any rank.

Each rank writes one file of shards.  What all ranks read at a resume (``param_groups``, step counters) is in a file of
its own where the rest is sharded; else a node would have to fetch all shards for its sake.

A shard file is a row of ``torch.save`` streams.  A tensor's stream is a *skeleton* (the same for every tensor of that
dtype and shape) around its payload, so a file can be laid out before there is a value in it, and refilled in place
for every save (``slots``).  Checksums inside the streams are switched off, because the payload changes under them;
the manifest has a digest of the whole file.
"""

from __future__ import annotations

import dataclasses
import gc
import io
import itertools
import math
import mmap
import pickle
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    _validate_global_plan,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.serialization import get_crc32_options, set_crc32_options

from lightning_resilience.errors import SaveFailed
from lightning_resilience.flat import FlatState
from lightning_resilience.manifest import shard_file


@contextmanager
def collector_paused() -> Iterator[None]:
    """While many small objects are made, none of them garbage: looking for it takes longer than making them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


ALIGNMENT = 64
"""Every stream starts at a multiple of this many bytes, so that its payload does too and can be viewed as any dtype."""
PAGE = mmap.PAGESIZE
"""Bytes; a file starts at a multiple of them in the slot."""
SMALL = 4096
"""Bytes up to which what all ranks read is not worth spreading over several files."""


def local_tensor(value: Any, offsets: Sequence[int]) -> Tensor:
    """This rank's part of ``value`` whose first element is at ``offsets`` of the whole."""
    if isinstance(value, DTensor):
        return value.to_local()
    if isinstance(value, ShardedTensor):
        for shard in value.local_shards():
            if tuple(shard.metadata.shard_offsets) == tuple(offsets):
                return shard.tensor
        raise KeyError(f"no local shard at {tuple(offsets)}")
    assert isinstance(value, Tensor)
    return value


# -- who writes what --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LocalPlan:
    """What one rank could write: DCP's items, and which keys other ranks hold identically, so that any may write
    them."""

    items: list[WriteItem]
    mappings: dict[str, tuple[str | int, ...]]
    identical: frozenset[str]
    tied: dict[str, str]
    empty: set[str]


@dataclass(frozen=True)
class Piece:
    """What a rank will write: ``item``, cut from its local tensor that starts at ``base`` of the whole tensor;
    ``common`` where all ranks read it when it is loaded, and not all of the state is so."""

    item: WriteItem
    base: tuple[int, ...] = ()
    common: bool = False

    @property
    def key(self) -> str:
        return self.item.index.fqn

    @property
    def is_object(self) -> bool:
        return self.item.type == WriteItemType.BYTE_IO

    def cut(self, flat: FlatState) -> Tensor:
        """The tensor to copy: a view of this rank's memory."""
        tensor = local_tensor(flat[self.key], self.base).detach()
        for dim, (offset, base, size) in enumerate(zip(*self._box(), strict=True)):
            if size != tensor.size(dim):
                tensor = tensor.narrow(dim, offset - base, size)
        return tensor

    def _box(self) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
        chunk = _chunk(self.item)
        return chunk.offsets, self.base, chunk.sizes


@dataclass
class GlobalPlan:
    """The pieces of each rank, DCP's metadata without storage positions, and the tied keys with the key they share."""

    pieces: list[list[Piece]]
    metadata: Metadata
    tied: dict[str, str]


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
    return LocalPlan(items, flat.outline.paths, frozenset(identical), tied, empty)


def share_out(plans: Sequence[LocalPlan]) -> GlobalPlan:
    """Give every piece of the state to one rank, so that the files come out even.

    What only one rank holds is its to write.  What several hold goes to the one with the least to write so far,
    largest first, and is cut along its first dimension where one rank would get more than its even part.  Small things
    that all read stay together, on the lowest rank.
    """
    world = len(plans)
    tied = _tied_everywhere(plans)
    owners: dict[tuple[str, Any], list[int]] = {}
    items: dict[tuple[str, Any], WriteItem] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            if item.index.fqn in tied or _is_empty_shard(item):
                continue
            where = (item.index.fqn, item.index.offset)
            owners.setdefault(where, []).append(rank)
            items.setdefault(where, item)

    pieces: list[list[Piece]] = [[] for _ in range(world)]
    load = [0] * world
    shared: list[tuple[int, WriteItem, list[int]]] = []
    sharded = any(len(ranks) < world for ranks in owners.values())
    for where, ranks in owners.items():
        item = items[where]
        replicated = item.type == WriteItemType.SHARD or item.index.fqn in plans[ranks[0]].identical
        common = sharded and (len(ranks) == world or _is_one_number(item))
        if len(ranks) > 1 and replicated and not (common and _bytes_of(item) <= SMALL):
            shared.append((_bytes_of(item), item, ranks))
        else:
            pieces[ranks[0]].append(Piece(item, _base(item), common))
            load[ranks[0]] += _bytes_of(item)

    even = math.ceil((sum(load) + sum(size for size, _, _ in shared)) / world)
    for _, item, ranks in sorted(shared, key=lambda entry: -entry[0]):
        for part in _cut(item, max(even, 1) if len(ranks) > 1 else _bytes_of(item)):
            rank = min(ranks, key=lambda r: load[r])
            pieces[rank].append(Piece(part, _base(item), sharded and len(ranks) == world))
            load[rank] += _bytes_of(part)

    mappings: dict[str, tuple[str | int, ...]] = {}
    for plan in reversed(plans):
        mappings.update(plan.mappings)
    return _with_metadata(pieces, tied, mappings)


def _with_metadata(
    pieces: list[list[Piece]], tied: dict[str, str], mappings: dict[str, tuple[str | int, ...]]
) -> GlobalPlan:
    plans, metadata = create_default_global_save_plan([SavePlan([p.item for p in rank]) for rank in pieces])
    if errors := _misfits(plans, metadata):
        raise SaveFailed(f"The ranks' tensors do not fit together: {'; '.join(errors)[:1000]}.", stage="plan")
    for key, first in tied.items():
        metadata.state_dict_metadata[key] = metadata.state_dict_metadata[first]
    metadata.planner_data = {key: path for key, path in mappings.items() if key in metadata.state_dict_metadata}
    indexed = [
        [Piece(item, piece.base, piece.common) for piece, item in zip(rank, plan.items, strict=True)]
        for rank, plan in zip(pieces, plans, strict=True)
    ]
    return GlobalPlan(indexed, metadata, tied)


def _misfits(plans: list[SavePlan], metadata: Metadata) -> list[str]:
    """What overlaps, sticks out or leaves gaps."""
    told: Any = _validate_global_plan(plans, metadata)
    if isinstance(told, bool):  # older torch logs which
        return [] if told else ["see the warnings of torch.distributed.checkpoint in the log"]
    errors: list[str] = told
    return errors


def _tied_everywhere(plans: Sequence[LocalPlan]) -> dict[str, str]:
    """Keys that every rank with a part of them finds tied to the same key."""
    candidates = {key: first for plan in plans for key, first in plan.tied.items()}
    return {
        key: first
        for key, first in candidates.items()
        if all(plan.tied.get(key) == first or key in plan.empty for plan in plans)
    }


def _cut(item: WriteItem, limit: int) -> Iterator[WriteItem]:
    """``item`` in parts of at most ``limit`` bytes, where its first dimension allows it."""
    size, data = _bytes_of(item), item.tensor_data
    rows = data.chunk.sizes[0] if data is not None and len(data.chunk.sizes) else 1
    count = min(rows, math.ceil(size / limit)) if size else 1
    if data is None or count <= 1:
        yield item
        return
    edges = [rows * i // count for i in range(count + 1)]
    for start, stop in itertools.pairwise(edges):
        offsets = torch.Size((data.chunk.offsets[0] + start, *data.chunk.offsets[1:]))
        sizes = torch.Size((stop - start, *data.chunk.sizes[1:]))
        yield WriteItem(
            index=MetadataIndex(item.index.fqn, offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(ChunkStorageMetadata(offsets, sizes), data.properties, data.size),
        )


def _chunk(item: WriteItem) -> ChunkStorageMetadata:
    assert item.tensor_data is not None
    return item.tensor_data.chunk


def _base(item: WriteItem) -> tuple[int, ...]:
    return () if item.tensor_data is None else tuple(item.tensor_data.chunk.offsets)


def _bytes_of(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def _is_one_number(item: WriteItem) -> bool:
    return item.tensor_data is not None and math.prod(item.tensor_data.size) == 1


def _is_empty_shard(item: WriteItem) -> bool:
    data = item.tensor_data
    return data is not None and math.prod(data.chunk.sizes) == 0 and math.prod(data.size) > 0


# -- where it lies ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Skeleton:
    """What ``torch.save`` writes around the payload of a contiguous CPU tensor of one dtype and shape."""

    head: bytes
    tail: bytes

    @classmethod
    def of(cls, dtype: torch.dtype, shape: Sequence[int]) -> Skeleton:
        template = torch.empty(tuple(shape), dtype=dtype)
        capture = _Capture(template.numel() * template.element_size())
        with _without_checksums():
            torch.save(template, capture)  # type: ignore[arg-type]  # a file that can only be written
        return cls(*capture.halves())


class _Capture(io.RawIOBase):
    """A file that keeps what ``torch.save`` writes before and after the payload, but not the payload.

    The payload is the write that follows the name and the padding of the record ``data/0``.
    """

    def __init__(self, payload_bytes: int) -> None:
        super().__init__()
        self._payload_bytes = payload_bytes
        self._head: list[bytes] = []
        self._tail: list[bytes] = []
        self._countdown: int | None = None

    def write(self, block: Any) -> int:
        size = memoryview(block).nbytes
        if self._countdown is None:
            self._head.append(bytes(block))
            if self._head[-1].endswith(b"/data/0"):
                self._countdown = 1
        elif self._countdown > 0:
            self._head.append(bytes(block))
            self._countdown -= 1
        elif self._countdown == 0 and self._payload_bytes:
            if size != self._payload_bytes:
                raise SaveFailed(
                    f"torch.save wrote {size} bytes where {self._payload_bytes} were expected.", stage="plan"
                )
            self._countdown = -1
        else:
            self._tail.append(bytes(block))
        return size

    def halves(self) -> tuple[bytes, bytes]:
        return b"".join(self._head), b"".join(self._tail)


@contextmanager
def _without_checksums() -> Iterator[None]:
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


@dataclass(frozen=True)
class TensorSpot:
    """Where a tensor's payload lies in the shard file: ``offset`` and ``nbytes`` in bytes."""

    piece: Piece
    offset: int
    nbytes: int

    @property
    def dtype(self) -> torch.dtype:
        assert self.piece.item.tensor_data is not None
        return self.piece.item.tensor_data.properties.dtype

    @property
    def shape(self) -> torch.Size:
        return _chunk(self.piece.item).sizes


@dataclass(frozen=True)
class ObjectSpot:
    """Where a pickled object lies, and how many bytes it may grow to."""

    piece: Piece
    offset: int
    capacity: int


@dataclass
class Layout:
    """One rank's shard files in a row: ``size`` in bytes, the spots to fill, and the constant bytes between them by
    offset.  What all ranks read comes first, up to the offset ``common``; it is a file of its own."""

    size: int = 0
    common: int = 0
    tensors: list[TensorSpot] = field(default_factory=list)
    objects: list[ObjectSpot] = field(default_factory=list)
    constant: list[tuple[int, bytes]] = field(default_factory=list)
    extents: list[Extent] = field(default_factory=list)

    def files(self, rank: int) -> dict[str, slice]:
        """The files of this rank, and where they are."""
        parts = {shard_file(rank): slice(self.common, self.size)}
        return {shard_file(rank, 1): slice(0, self.common), **parts} if self.common else parts


Extent: TypeAlias = tuple[MetadataIndex, int, int, int]
"""A piece, the part (see ``shard_file``) it is in, and its offset in that and its length, in bytes."""


def lay_out(pieces: Sequence[Piece], flat: FlatState) -> Layout:
    """Find every piece its place: what is common first, and objects before tensors, in the order of the state."""
    layout = Layout()
    ordered = sorted(pieces, key=lambda piece: (not piece.common, not piece.is_object))
    common = [piece for piece in ordered if piece.common]
    _lay_out(layout, common, flat, 1)
    layout.common = layout.size = -(-layout.size // PAGE) * PAGE
    _lay_out(layout, ordered[len(common) :], flat, 0)
    return layout


def _lay_out(layout: Layout, pieces: Sequence[Piece], flat: FlatState, part: int) -> None:
    """Append the pieces of one file."""
    begin = layout.size
    skeletons: dict[tuple[torch.dtype, torch.Size], Skeleton] = {}
    for piece in pieces:
        start = -(-layout.size // ALIGNMENT) * ALIGNMENT
        if piece.is_object:
            # Room for an object to grow (a counter that needs another byte) before the layout has to change.
            capacity = 2 * len(dump_object(flat[piece.key])) + 2 * ALIGNMENT
            layout.objects.append(ObjectSpot(piece, start, capacity))
            length = capacity
        else:
            assert piece.item.tensor_data is not None
            kind = piece.item.tensor_data.properties.dtype, piece.item.tensor_data.chunk.sizes
            skeleton = skeletons.get(kind)
            if skeleton is None:
                skeleton = skeletons[kind] = Skeleton.of(*kind)
            spot = TensorSpot(piece, start + len(skeleton.head), _bytes_of(piece.item))
            layout.tensors.append(spot)
            layout.constant += [(start, skeleton.head), (spot.offset + spot.nbytes, skeleton.tail)]
            length = len(skeleton.head) + spot.nbytes + len(skeleton.tail)
        layout.extents.append((piece.item.index, part, start - begin, length))
        layout.size = start + length


def dump_object(value: Any) -> bytes:
    """Pickle a value that is not a tensor.

    In ``torch.save``'s stream format, which every ``torch.load`` reads up to its end and no further, so that the spot
    can be larger than the object; the zip format cannot be padded.
    """
    if type(value) is list and set(map(type, value)) == {str}:
        return _dump_names(tuple(value))
    return _dump(value)


def _dump(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


@lru_cache(16)
def _dump_names(names: tuple[str, ...]) -> bytes:
    """Those of an optimizer's parameters are many, and the same in every save."""
    return _dump(list(names))


def metadata_bytes(plan: GlobalPlan, extents: Sequence[Sequence[Extent]]) -> bytes:
    """Content of ``.metadata``: the plan, and where each rank's layout put its pieces."""
    positions: dict[MetadataIndex, _StorageInfo] = {}
    by_key: dict[str, list[MetadataIndex]] = {}
    for rank, of_rank in enumerate(extents):
        for index, part, offset, length in of_rank:
            positions[index] = _StorageInfo(shard_file(rank, part), offset, length)
            by_key.setdefault(index.fqn, []).append(index)
    for key, first in plan.tied.items():
        for index in by_key[first]:
            positions[MetadataIndex(key, index.offset, index.index)] = positions[index]
    whole = dataclasses.replace(
        plan.metadata, storage_data=positions, storage_meta=StorageMeta(), version=CURRENT_DCP_VERSION
    )
    return pickle.dumps(whole)
