"""One shard file of a checkpoint, and what is wanted of it.

Files that this package wrote hold plain contiguous payloads, which ``filling`` reads into their tensors' own memory;
where a tensor has another layout, they are mapped and copied from.  What other writers left is loaded stream by stream
with ``torch.load``.
"""

from __future__ import annotations

import io
import math
import mmap
import pickle
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from lightning_resilience.errors import CheckpointCorrupt, CheckpointIncompatible
from lightning_resilience.filling import Piece, apart, fill, fill_and_digest, takes_bytes
from lightning_resilience.manifest import FileEntry
from lightning_resilience.store import digest_problem, unreadable

_LOCAL_HEADER = b"PK\x03\x04"
_RECORD = b"/data/0"


@dataclass
class _Copy:
    """An item on its way from a mapped file to its target; the ``piece`` that it is where no map is needed."""

    item: ReadItem
    planner: LoadPlanner
    target: Tensor
    source: Tensor
    piece: Piece | None = None


class ShardFile:
    """One file, and what is wanted of it.

    Args:
        path: of the file.
        metadata: of the checkpoint.
        wanted: items, in the order in which they lie there, and the planners that know what they are for.
        plain: see ``CheckpointReader``.
        weights_only: see ``load_trusted``.

    Raises:
        CheckpointCorrupt: there is something else where a tensor should be.
    """

    def __init__(
        self,
        path: Path,
        metadata: Metadata,
        wanted: Iterable[tuple[ReadItem, LoadPlanner]],
        *,
        plain: bool,
        weights_only: bool | None,
    ) -> None:
        self.path = path
        self._metadata = metadata
        self._plain = plain
        self._weights_only = weights_only
        self._copies: list[_Copy] = []
        self._objects: list[tuple[ReadItem, LoadPlanner]] = []
        self._filled: set[Piece] = set()
        for item, planner in wanted:
            if item.type == LoadItemType.BYTE_IO:
                self._objects.append((item, planner))
            else:
                self._copies.append(self._copy(item, planner))

    @cached_property
    def _mapped(self) -> mmap.mmap:
        with open(self.path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    @cached_property
    def _begin(self) -> int:
        """Where it is mapped."""
        return torch.frombuffer(self._mapped, dtype=torch.uint8, count=1).data_ptr()

    def _copy(self, item: ReadItem, planner: LoadPlanner) -> _Copy:
        target = planner.resolve_tensor(item).detach()
        if not target.numel():
            return _Copy(item, planner, target, target)
        whole = self._payload(item) if self._plain else self._loaded(item)
        source = narrow_tensor_by_index(whole, item.storage_offsets, item.lengths)
        is_piece = self._plain and takes_bytes(source, target)
        piece = Piece(target, source.data_ptr() - self._begin) if is_piece else None
        return _Copy(item, planner, target, source, piece)

    @property
    def pieces(self) -> list[Piece]:
        """What takes bytes as they are."""
        return [copy.piece for copy in self._copies if copy.piece is not None]

    def fill_and_check(self, entry: FileEntry) -> str | None:
        """Fill what takes bytes as they are, and digest the file on the way; what is wrong with it, if anything."""
        pieces, _ = apart(self.pieces)
        try:
            digest = fill_and_digest(self.path, pieces)
        except OSError as error:
            return unreadable(entry, error)
        self._filled.update(pieces)
        return digest_problem(entry, digest)

    def finish(self) -> None:
        """Fill the rest, and hand out the objects."""
        in_place = [piece for piece in self.pieces if piece.is_read_in_place and piece not in self._filled]
        if in_place:
            fill(self.path, in_place)
            self._filled.update(in_place)
        for copy in self._copies:
            if copy.piece not in self._filled and copy.source is not copy.target:
                copy.target.copy_(copy.source)
            copy.planner.commit_tensor(copy.item, copy.target)
        for item, planner in self._objects:
            info = self._metadata.storage_data[item.storage_index]
            stream = self._mapped[info.offset : info.offset + info.length]
            load_trusted(stream, self._weights_only)  # the planner loads whatever it is
            planner.load_bytes(item, io.BytesIO(stream))

    def _payload(self, item: ReadItem) -> Tensor:
        """A view of one stored chunk."""
        mapped, info = self._mapped, self._metadata.storage_data[item.storage_index]
        entry = self._metadata.state_dict_metadata[item.storage_index.fqn]
        assert isinstance(entry, TensorStorageMetadata)
        shape = _stored_sizes(entry, item.storage_index)
        dtype = entry.properties.dtype
        name = mapped.find(_RECORD, info.offset, info.offset + info.length)
        header = mapped.rfind(_LOCAL_HEADER, info.offset, name)
        if name < 0 or header < 0:
            raise CheckpointCorrupt(f"{self.path}: no tensor at byte {info.offset}.")
        start = header + 30 + int.from_bytes(mapped[header + 26 : header + 28], "little")
        start += int.from_bytes(mapped[header + 28 : header + 30], "little")
        if start + math.prod(shape) * dtype.itemsize > info.offset + info.length:
            raise CheckpointCorrupt(f"{self.path}: the tensor at byte {info.offset} is cut short.")
        return torch.frombuffer(mapped, dtype=dtype, count=math.prod(shape), offset=start).view(shape)

    def _loaded(self, item: ReadItem) -> Tensor:
        """One stored chunk, loaded."""
        info = self._metadata.storage_data[item.storage_index]
        stream = io.BytesIO(self._mapped[info.offset : info.offset + info.length])
        loaded = torch.load(stream, map_location="cpu", weights_only=True)
        assert isinstance(loaded, Tensor)
        return loaded


def _stored_sizes(entry: TensorStorageMetadata, index: MetadataIndex) -> torch.Size:
    hint = index.index
    if hint is not None and hint < len(entry.chunks) and entry.chunks[hint].offsets == index.offset:
        return entry.chunks[hint].sizes
    return next(chunk.sizes for chunk in entry.chunks if index.offset is None or chunk.offsets == index.offset)


def load_trusted(data: bytes, weights_only: bool | None = None) -> Any:
    """Unpickle what a manifest's digest vouches for: tensors and plain values only where that is all there is.

    Args:
        data: a ``torch.save`` stream.
        weights_only: the user's wish; True refuses other objects, None and False load them.

    Raises:
        CheckpointIncompatible: there are other objects and ``weights_only`` is True.
    """
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if weights_only:
            raise CheckpointIncompatible(
                f"The checkpoint holds objects that weights_only=True does not load: {_first_line(error)}",
                hint="Pass weights_only=False if you trust the checkpoint, or register the type with "
                "torch.serialization.add_safe_globals.",
            ) from error
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def _first_line(error: BaseException) -> str:
    unsupported = re.search(r"GLOBAL (\S+)", str(error))
    return f"{unsupported.group(1)}." if unsupported else str(error).splitlines()[0]
