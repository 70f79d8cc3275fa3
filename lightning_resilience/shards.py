"""Tensors to shard files: the pieces that a rank writes, and where in its file each lies.

Each rank writes one file of shards.  What all ranks read at a resume (``param_groups``, step counters) is in a file of
its own where the rest is sharded; else a node would have to fetch all shards for its sake.

A shard file is a row of ``torch.save`` streams.  A tensor's stream is a *skeleton* (the same for every tensor of that
dtype and shape) around its payload, so a file can be laid out before there is a value in it, and refilled in place
for every save (``slots``).  Checksums inside the streams are switched off, because the payload changes under them;
the manifest has a digest of the whole file.
"""

from __future__ import annotations

import gc
import io
import math
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
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


def _chunk(item: WriteItem) -> ChunkStorageMetadata:
    assert item.tensor_data is not None
    return item.tensor_data.chunk


@dataclass(frozen=True)
class Skeleton:
    """What ``torch.save`` writes around the payload of a contiguous CPU tensor of one dtype and shape."""

    head: bytes
    tail: bytes

    @classmethod
    def of(cls, dtype: torch.dtype, shape: Sequence[int]) -> Skeleton:
        template = torch.empty(tuple(shape), dtype=dtype, device="cpu")
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
    offset.  What all ranks read comes first, up to the offset ``common``; it is a file of its own.  ``extents`` are the
    offset of each piece in its file and its length, in bytes, in the order of ``in_order``."""

    size: int = 0
    common: int = 0
    tensors: list[TensorSpot] = field(default_factory=list)
    objects: list[ObjectSpot] = field(default_factory=list)
    constant: list[tuple[int, bytes]] = field(default_factory=list)
    extents: list[tuple[int, int]] = field(default_factory=list)

    def files(self, rank: int) -> dict[str, slice]:
        """The files of this rank, and where they are."""
        parts = {shard_file(rank): slice(self.common, self.size)}
        return {shard_file(rank, 1): slice(0, self.common), **parts} if self.common else parts


def lay_out(pieces: Sequence[Piece], flat: FlatState) -> Layout:
    """Find every piece its place: what is common first, and objects before tensors, in the order of the state."""
    layout = Layout()
    order = in_order([piece.common for piece in pieces], [piece.is_object for piece in pieces])
    ordered = [pieces[place] for place in order]
    common = [piece for piece in ordered if piece.common]
    _lay_out(layout, common, flat)
    layout.common = layout.size = -(-layout.size // PAGE) * PAGE
    _lay_out(layout, ordered[len(common) :], flat)
    return layout


def in_order(common: Sequence[bool], is_object: Sequence[bool]) -> list[int]:
    """Which piece comes first, second and so on in the files of a rank."""
    return sorted(range(len(common)), key=lambda place: (not common[place], not is_object[place]))


def _lay_out(layout: Layout, pieces: Sequence[Piece], flat: FlatState) -> None:
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
            dtype, shape = kind
            spot = TensorSpot(piece, start + len(skeleton.head), math.prod(shape) * dtype.itemsize)
            layout.tensors.append(spot)
            layout.constant += [(start, skeleton.head), (spot.offset + spot.nbytes, skeleton.tail)]
            length = len(skeleton.head) + spot.nbytes + len(skeleton.tail)
        layout.extents.append((start - begin, length))
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
