"""One shard file of a checkpoint, and what is wanted of it.

Files that this package wrote hold plain contiguous payloads, which ``filling`` reads into their tensors' own memory;
where a tensor has another layout, they are mapped and copied from.  What other writers left is loaded stream by stream
with ``torch.load``.
"""

from __future__ import annotations

import io
import math
import mmap
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from lightning_resilience.errors import CheckpointCorrupt
from lightning_resilience.filling import Span, fill, fill_and_digest, split_where_bytes_overlap, takes_bytes
from lightning_resilience.manifest import FileEntry
from lightning_resilience.store import digest_problem, unreadable
from lightning_resilience.trusted import load_trusted

_LOCAL_HEADER = b"PK\x03\x04"
_RECORD = b"/data/0"
HEAD = 4096
"""Bytes of a stored tensor in which its elements begin."""


@dataclass
class _Copy:
    """An item on its way to its target: from ``begin`` in the file where it lies there as it is, in a tensor of the
    ``shape`` of its chunk; the ``span`` that it is where the target takes its bytes as they are."""

    item: ReadItem
    planner: LoadPlanner
    target: Tensor
    begin: int = 0
    shape: tuple[int, ...] = ()
    span: Span | None = None


class ShardFile:
    """One file, and what is wanted of it.  Nothing of it is mapped before it is filled from and checked: of a bad
    sector a map would tell with a signal.

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
        wanted: Sequence[tuple[ReadItem, LoadPlanner]],
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
        self._filled: set[Span] = set()
        with ExitStack() as opened:
            file = opened.enter_context(open(path, "rb", buffering=0)) if plain and wanted else None
            for item, planner in wanted:
                if item.type == LoadItemType.BYTE_IO:
                    self._objects.append((item, planner))
                else:
                    self._copies.append(self._copy(item, planner, file))

    def _copy(self, item: ReadItem, planner: LoadPlanner, file: FileIO | None) -> _Copy:
        target = planner.resolve_tensor(item).detach()
        if file is None or not target.numel():
            return _Copy(item, planner, target)
        entry = self._entry(item)
        copy = _Copy(
            item, planner, target, self._begin_of(item, file.fileno()), _stored_sizes(entry, item.storage_index)
        )
        # Where the part that is wanted lies in the chunk a tensor without memory tells.
        chunk = torch.empty(copy.shape, dtype=entry.properties.dtype, device="meta")
        part = narrow_tensor_by_index(chunk, item.storage_offsets, item.lengths)
        if takes_bytes(part, target):
            copy.span = Span(target, copy.begin + int(part.storage_offset()) * part.itemsize)
        return copy

    def _entry(self, item: ReadItem) -> TensorStorageMetadata:
        entry = self._metadata.state_dict_metadata[item.storage_index.fqn]
        assert isinstance(entry, TensorStorageMetadata)
        return entry

    def _begin_of(self, item: ReadItem, fd: int) -> int:
        """Where the elements of a stored chunk begin."""
        info, entry = self._metadata.storage_data[item.storage_index], self._entry(item)
        head = os.pread(fd, min(HEAD, info.length), info.offset)
        name = head.find(_RECORD)
        header = head.rfind(_LOCAL_HEADER, 0, max(name, 0))
        if name < 0 or header < 0:
            raise CheckpointCorrupt(f"{self.path}: no tensor at byte {info.offset}.")
        # A local header of ZIP (APPNOTE 4.3.7): 30 bytes, whose last four are the lengths of name and extra field.
        start = header + 30 + int.from_bytes(head[header + 26 : header + 28], "little")
        start += int.from_bytes(head[header + 28 : header + 30], "little")
        size = math.prod(_stored_sizes(entry, item.storage_index)) * entry.properties.dtype.itemsize
        if start + size > info.length:
            raise CheckpointCorrupt(f"{self.path}: the tensor at byte {info.offset} is cut short.")
        begin: int = info.offset + start
        return begin

    @property
    def spans(self) -> list[Span]:
        """What takes bytes as they are."""
        return [copy.span for copy in self._copies if copy.span is not None]

    def fill_and_check(self, entry: FileEntry) -> str | None:
        """Fill what takes bytes as they are, and digest the file on the way; what is wrong with it, if anything."""
        spans, _ = split_where_bytes_overlap(self.spans)
        try:
            digest = fill_and_digest(self.path, spans)
        except OSError as error:
            return unreadable(entry, error)
        self._filled.update(spans)
        return digest_problem(entry, digest)

    def finish(self) -> None:
        """Fill the rest, and hand out the objects."""
        in_place = [span for span in self.spans if span.is_in_host_memory and span not in self._filled]
        if in_place:
            fill(self.path, in_place)
            self._filled.update(in_place)
        for copy in self._copies:
            if copy.span not in self._filled and copy.target.numel():
                source = self._mapped_chunk(copy) if self._plain else self._loaded(copy.item)
                copy.target.copy_(narrow_tensor_by_index(source, copy.item.storage_offsets, copy.item.lengths))
            copy.planner.commit_tensor(copy.item, copy.target)
        for item, planner in self._objects:
            stream = self._stream(item)
            load_trusted(stream, self._weights_only)  # the planner loads whatever it is
            planner.load_bytes(item, io.BytesIO(stream))

    @cached_property
    def _mapped(self) -> mmap.mmap:
        with open(self.path, "rb") as file:
            if not os.fstat(file.fileno()).st_size:
                raise CheckpointCorrupt(f"{self.path} is empty.")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def _mapped_chunk(self, copy: _Copy) -> Tensor:
        """A view of one stored chunk."""
        dtype, count = self._entry(copy.item).properties.dtype, math.prod(copy.shape)
        if copy.begin + count * dtype.itemsize > len(self._mapped):
            raise CheckpointCorrupt(f"{self.path} ends at byte {len(self._mapped)}, in the middle of a tensor.")
        return torch.frombuffer(self._mapped, dtype=dtype, count=count, offset=copy.begin).view(copy.shape)

    def _stream(self, item: ReadItem) -> bytes:
        info = self._metadata.storage_data[item.storage_index]
        return self._mapped[info.offset : info.offset + info.length]

    def _loaded(self, item: ReadItem) -> Tensor:
        """One stored chunk, loaded."""
        loaded = torch.load(io.BytesIO(self._stream(item)), map_location="cpu", weights_only=True)
        assert isinstance(loaded, Tensor)
        return loaded


def _stored_sizes(entry: TensorStorageMetadata, index: MetadataIndex) -> torch.Size:
    hint = index.index
    if hint is not None and hint < len(entry.chunks) and entry.chunks[hint].offsets == index.offset:
        return entry.chunks[hint].sizes
    return next(chunk.sizes for chunk in entry.chunks if index.offset is None or chunk.offsets == index.offset)
