"""One shard file of a checkpoint, and what is wanted of it.

Files that this package wrote hold plain contiguous payloads, which ``filling`` reads into their tensors' own memory;
where a tensor has another layout, they are mapped and copied from.  What other writers left is loaded stream by stream
with ``torch.load``.
"""

from __future__ import annotations

import io
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from lightning_resilience.errors import CheckpointCorrupt
from lightning_resilience.filling import Span, fill, fill_and_digest, locate, split_where_bytes_overlap, takes_bytes
from lightning_resilience.manifest import FileEntry
from lightning_resilience.store import digest_problem, unreadable
from lightning_resilience.stored import Stored
from lightning_resilience.trusted import load_trusted


@dataclass
class _Copy:
    """An item on its way to its target, from the chunk that is ``stored``, where that is plain; the ``span`` that it is
    where the target takes its bytes as they are."""

    item: ReadItem
    planner: LoadPlanner
    target: Tensor
    stored: Stored | None = None
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
        self._stored: dict[int, Stored] = {}  # by where it begins
        for item, planner in wanted:
            if item.type == LoadItemType.BYTE_IO:
                self._objects.append((item, planner))
            else:
                self._copies.append(self._copy(item, planner))

    def _copy(self, item: ReadItem, planner: LoadPlanner) -> _Copy:
        target = planner.resolve_tensor(item).detach()
        if not self._plain or not target.numel():
            return _Copy(item, planner, target)
        chunk = self._chunk(item)
        stored = self._stored_at(self._metadata.storage_data[item.storage_index], chunk)
        part = narrow_tensor_by_index(chunk, item.storage_offsets, item.lengths)
        if not takes_bytes(part, target):
            return _Copy(item, planner, target, stored)
        return _Copy(item, planner, target, stored, Span(target, stored, int(part.storage_offset()) * part.itemsize))

    def _chunk(self, item: ReadItem) -> Tensor:
        """A stored chunk without its elements, which tells where parts of it lie."""
        entry = self._metadata.state_dict_metadata[item.storage_index.fqn]
        assert isinstance(entry, TensorStorageMetadata)
        return _without_memory(_stored_sizes(entry, item.storage_index), entry.properties.dtype)

    def _stored_at(self, info: Any, chunk: Tensor) -> Stored:
        if (stored := self._stored.get(info.offset)) is None:
            stored = self._stored[info.offset] = Stored(self.path, info.offset, info.length, chunk.nbytes)
        return stored

    @property
    def spans(self) -> list[Span]:
        """What takes bytes as they are."""
        return [copy.span for copy in self._copies if copy.span is not None]

    def fill_and_check(self, entry: FileEntry) -> str | None:
        """Fill what takes bytes as they are, and digest the file on the way; what is wrong with it, if anything."""
        spans, _ = split_where_bytes_overlap(self.spans)
        try:
            digest = fill_and_digest(self.path, spans)
        except CheckpointCorrupt as error:
            return f"{entry.path} has something else than was saved ({error.message.rstrip('.')})"
        except OSError as error:
            return unreadable(entry, error)
        self._filled.update(spans)
        return digest_problem(entry, digest)

    def finish(self) -> None:
        """Fill the rest, and hand out the objects.

        Raises:
            CheckpointCorrupt: there is something else where a tensor should be.
        """
        if spans := [span for span in self.spans if span not in self._filled]:
            fill(self.path, spans)
            self._filled.update(spans)
        locate(self.path, {copy.stored: None for copy in self._copies if copy.stored and self._is_left(copy)})
        for copy in self._copies:
            if self._is_left(copy):
                source = self._loaded(copy.item) if copy.stored is None else self._mapped_chunk(copy.item, copy.stored)
                copy.target.copy_(narrow_tensor_by_index(source, copy.item.storage_offsets, copy.item.lengths))
            copy.planner.commit_tensor(copy.item, copy.target)
        for item, planner in self._objects:
            stream = self._stream(item)
            load_trusted(stream, self._weights_only)  # the planner loads whatever it is
            planner.load_bytes(item, io.BytesIO(stream))

    def _is_left(self, copy: _Copy) -> bool:
        return copy.span not in self._filled and copy.target.numel() > 0

    @cached_property
    def _mapped(self) -> mmap.mmap:
        with open(self.path, "rb") as file:
            if not os.fstat(file.fileno()).st_size:
                raise CheckpointCorrupt(f"{self.path} is empty.")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def _mapped_chunk(self, item: ReadItem, stored: Stored) -> Tensor:
        """A view of one stored chunk."""
        chunk = self._chunk(item)
        assert stored.begin is not None
        if stored.begin + stored.size > len(self._mapped):
            raise CheckpointCorrupt(f"{self.path} ends at byte {len(self._mapped)}, in the middle of a tensor.")
        elements = torch.frombuffer(self._mapped, dtype=chunk.dtype, count=chunk.numel(), offset=stored.begin)
        return elements.view(chunk.shape)

    def _stream(self, item: ReadItem) -> bytes:
        info = self._metadata.storage_data[item.storage_index]
        return self._mapped[info.offset : info.offset + info.length]

    def _loaded(self, item: ReadItem) -> Tensor:
        """One stored chunk, loaded."""
        loaded = torch.load(io.BytesIO(self._stream(item)), map_location="cpu", weights_only=True)
        assert isinstance(loaded, Tensor)
        return loaded


@lru_cache
def _without_memory(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _stored_sizes(entry: TensorStorageMetadata, index: MetadataIndex) -> torch.Size:
    hint = index.index
    if hint is not None and hint < len(entry.chunks) and entry.chunks[hint].offsets == index.offset:
        return entry.chunks[hint].sizes
    return next(chunk.sizes for chunk in entry.chunks if index.offset is None or chunk.offsets == index.offset)
