"""Shard files to tensors: any DCP folder, read straight into tensors that are already there.

Keys are compared in a *canonical* form, so that a checkpoint fits whatever wrapped the model when it was saved: the
first component is ``model`` (``ModelParallelStrategy`` writes ``state_dict``), and the names that wrappers insert
(``torch.compile``, activation checkpointing, FSDP) are left out.

Files that this package wrote hold plain contiguous payloads.  Large ones are read into their tensors' own memory, by
several threads; small ones, and those whose tensors have another layout or device, are mapped and copied from.  What
other writers left is loaded stream by stream with ``torch.load``.
"""

from __future__ import annotations

import ctypes
import dataclasses
import io
import itertools
import math
import mmap
import os
import pickle
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from lightning_resilience.errors import CheckpointCorrupt, CheckpointIncompatible
from lightning_resilience.manifest import METADATA
from lightning_resilience.shards import collector_paused

_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)(?:\.|$)")
_LOCAL_HEADER = b"PK\x03\x04"
_RECORD = b"/data/0"

DIRECT = 64 * 2**10
"""Bytes from which on a call to the kernel costs less than it spares."""
_AT_ONCE = 16 * 2**20
"""Bytes of one call."""
_MOST_THREADS = 4


def canonical(name: str) -> str:
    """A parameter's name without what wrappers insert."""
    return _WRAPPERS.sub("", name) if "_" in name else name


def canonical_path(path: Iterable[str | int]) -> tuple[str | int, ...]:
    """A DCP object path in canonical form."""
    first, *rest = path
    return ("model" if first == "state_dict" else first, *(canonical(p) if isinstance(p, str) else p for p in rest))


def key_of(path: Iterable[str | int]) -> str:
    """The flat key of a DCP object path."""
    return ".".join(map(str, path))


class CheckpointReader(StorageReader):
    """Reads one checkpoint.  Also a DCP ``StorageReader``, for torch's own loading routines.

    Args:
        locate: gives the path of a file of the checkpoint by its name.
        plain: whether the shard files are this package's, whose payloads are contiguous and whose digests were checked.
        weights_only: the user's wish, as ``torch.load`` takes it; without digests True unless False was asked for.

    Raises:
        CheckpointCorrupt: ``.metadata`` cannot be read.
    """

    def __init__(self, locate: Callable[[str], Path], *, plain: bool, weights_only: bool | None = None) -> None:
        self._locate = locate
        self._plain = plain
        self._weights_only = weights_only if plain else weights_only is not False
        path = locate(METADATA)
        try:
            with collector_paused():
                self.metadata = _canonical_metadata(pickle.loads(path.read_bytes()))
        except Exception as error:
            raise CheckpointCorrupt(f"{path} cannot be read: {type(error).__name__}: {error}.") from error
        self.paths: dict[str, tuple[str | int, ...]] = self.metadata.planner_data or {
            key: tuple(key.split(".", 1)) for key in self.metadata.state_dict_metadata
        }
        """DCP object path of each key."""

    # -- what is there ------------------------------------------------------------------------------------------------

    def shapes(self, part: str = "model") -> dict[str, tuple[int, ...] | None]:
        """Names in one part of the state, with their shape; None for an object."""
        shapes: dict[str, tuple[int, ...] | None] = {}
        for key, path in self.paths.items():
            if path[0] == part and key in self.metadata.state_dict_metadata:
                entry = self.metadata.state_dict_metadata[key]
                shapes[key_of(path[1:])] = tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None
        return shapes

    @property
    def optimizers(self) -> int:
        """How many optimizers the checkpoint has the state of."""
        parts = {path[0] for path in self.paths.values()}
        return sum(1 for part in parts if re.fullmatch(r"optimizer_\d+", str(part)))

    def files_for(self, model: Mapping[str, Any]) -> set[str]:
        """Names of the shard files with this rank's part of the state.

        Args:
            model: the model's sharded state.  An optimizer's state that has the shape of its parameter is read where
                the parameter is; what is of another shape, or belongs to no parameter, is read whole.
        """
        live = {canonical(name): value for name, value in model.items() if isinstance(value, Tensor)}
        targets: dict[str, Any] = {}
        for key, path in self.paths.items():
            entry = self.metadata.state_dict_metadata.get(key)
            # model.NAME, or optimizer_0.state.NAME.exp_avg
            name = key_of(path[1:]) if path[0] == "model" else str(path[2]) if len(path) == 4 else ""
            target = live.get(name)
            if isinstance(entry, TensorStorageMetadata) and target is not None and target.size() == entry.size:
                targets[key] = target
        where = self.metadata.storage_data
        parts = [where[item.storage_index] for item in self._planner(targets).create_local_plan().items]
        wholes = [info for index, info in where.items() if index.fqn not in targets]
        return {info.relative_path for info in (*parts, *wholes)}

    # -- reading ------------------------------------------------------------------------------------------------------

    def read_into(self, targets: Mapping[str, Any]) -> None:
        """Fill tensors in place.

        Args:
            targets: tensors of the checkpoint's global shapes (plain, DTensor or ShardedTensor) by canonical key.
        """
        planner = self._planner(targets)
        with collector_paused():
            self.read_data(planner.create_local_plan(), planner)

    def _planner(self, targets: Mapping[str, Any]) -> DefaultLoadPlanner:
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(targets), self.metadata)
        return planner

    def _tensor(self, key: str) -> TensorStorageMetadata:
        entry = self.metadata.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        return entry

    def read_object(self, key: str) -> Any:
        """A value that is not a tensor."""
        info = self.metadata.storage_data[MetadataIndex(key)]
        with open(self._locate(info.relative_path), "rb") as stream:
            stream.seek(info.offset)
            return load_trusted(stream.read(info.length), self._weights_only)

    def read_tree(self, part: str, allocate: Callable[[tuple[str | int, ...], TensorStorageMetadata], Any]) -> Any:
        """One part of the state as it was nested when saved.

        Args:
            part: first component of the keys, e.g. ``optimizer_0``.
            allocate: makes the tensor that an entry is read into, from its path below ``part`` and its metadata; None
                leaves it out.
        """
        tree: dict[str, Any] = {}
        targets: dict[str, Any] = {}
        for key, path in self.paths.items():
            if path[0] != part or key not in self.metadata.state_dict_metadata:
                continue
            entry = self.metadata.state_dict_metadata[key]
            if isinstance(entry, BytesStorageMetadata):
                value = self.read_object(key)
            else:
                value = allocate(path[1:], entry)
                if value is None:
                    continue
                targets[key] = value
            set_element(tree, path, value)
        self.read_into(targets)
        return tree.get(part, {})

    def read_full(self, part: str = "model") -> dict[str, Any]:
        """One part of the state as it was saved, whole and on the CPU."""
        tree: dict[str, Any] = self.read_tree(part, lambda _, entry: empty(entry))
        return tree

    def read_optimizer(self, index: int) -> dict[str, Any]:
        """An optimizer's state, whole and on the CPU, by number of parameter, as ``load_state_dict`` takes it."""
        saved = self.read_full(f"optimizer_{index}")
        names = [name for group in saved["param_groups"] for name in group["params"]]
        numbers: dict[str, Any] = {str(name): number for number, name in enumerate(names)}
        groups = [
            {**group, "params": [numbers[str(name)] for name in group["params"]]} for group in saved["param_groups"]
        ]
        state = {numbers.get(str(name), name): value for name, value in saved.get("state", {}).items()}
        return {**saved, "state": state, "param_groups": groups}

    @property
    def is_flat(self) -> bool:
        """Whether the model's state is nothing but tensors, one a name."""
        return all(
            len(path) == 2 and isinstance(self.metadata.state_dict_metadata.get(key), TensorStorageMetadata)
            for key, path in self.paths.items()
            if path[0] == "model"
        )

    # -- DCP's StorageReader ------------------------------------------------------------------------------------------

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.metadata.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            path = self._locate(name)
            with open(path, "rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
                items.sort(key=lambda item: self.metadata.storage_data[item.storage_index].offset)
                into = [direct for item in items if (direct := self._read_item(item, planner, mapped, path))]
                _read_direct(stream.fileno(), into, path)
                for direct in into:
                    planner.commit_tensor(direct.item, direct.target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_item(self, item: ReadItem, planner: LoadPlanner, mapped: mmap.mmap, path: Path) -> _Direct | None:
        """Copy one item from the map, or say how it is read without one."""
        info = self.metadata.storage_data[item.storage_index]
        if item.type == LoadItemType.BYTE_IO:
            stream = mapped[info.offset : info.offset + info.length]
            load_trusted(stream, self._weights_only)  # the planner loads whatever it is
            planner.load_bytes(item, io.BytesIO(stream))
            return None
        target = planner.resolve_tensor(item).detach()
        if target.numel():
            whole = self._payload(item, mapped, path) if self._plain else _load_stream(mapped, info)
            source = narrow_tensor_by_index(whole, item.storage_offsets, item.lengths)
            if self._plain and source.nbytes >= DIRECT and _is_same_bytes(source, target):
                begin = torch.frombuffer(mapped, dtype=torch.uint8, count=1).data_ptr()
                return _Direct(item, target, source.data_ptr() - begin)
            target.copy_(source)
            del whole, source
        planner.commit_tensor(item, target)
        return None

    def _payload(self, item: ReadItem, mapped: mmap.mmap, path: Path) -> Tensor:
        """A view of one stored chunk."""
        info = self.metadata.storage_data[item.storage_index]
        entry = self._tensor(item.storage_index.fqn)
        shape = _stored_sizes(entry, item.storage_index)
        dtype = entry.properties.dtype
        name = mapped.find(_RECORD, info.offset, info.offset + info.length)
        header = mapped.rfind(_LOCAL_HEADER, info.offset, name)
        if name < 0 or header < 0:
            raise CheckpointCorrupt(f"{path}: no tensor at byte {info.offset}.")
        start = header + 30 + int.from_bytes(mapped[header + 26 : header + 28], "little")
        start += int.from_bytes(mapped[header + 28 : header + 30], "little")
        if start + math.prod(shape) * dtype.itemsize > info.offset + info.length:
            raise CheckpointCorrupt(f"{path}: the tensor at byte {info.offset} is cut short.")
        return torch.frombuffer(mapped, dtype=dtype, count=math.prod(shape), offset=start).view(shape)


@dataclasses.dataclass(frozen=True)
class _Direct:
    """A target whose memory takes the bytes of the file from ``offset`` on as they are."""

    item: ReadItem
    target: Tensor
    offset: int

    @property
    def begin(self) -> int:
        return self.target.data_ptr()

    @property
    def end(self) -> int:
        return self.target.data_ptr() + self.target.nbytes


def _is_same_bytes(source: Tensor, target: Tensor) -> bool:
    """Whether copying ``source`` to ``target`` is copying one run of bytes to another, in this process's memory."""
    return (
        type(target) is Tensor
        and target.device.type == "cpu"
        and target.layout is torch.strided
        and target.dtype is source.dtype
        and target.shape == source.shape
        and target.is_contiguous()
        and source.is_contiguous()
        and not (target.is_conj() or target.is_neg() or target.is_inference())
    )


def _read_direct(fd: int, into: Sequence[_Direct], path: Path) -> None:
    """Fill tensors with bytes of one file; CheckpointCorrupt where it ends too early."""

    def read(address: int, offset: int, count: int) -> None:
        rest = memoryview((ctypes.c_char * count).from_address(address)).cast("B")
        while rest:
            done = os.preadv(fd, [rest], offset)
            if not done:
                raise CheckpointCorrupt(f"{path} ends at byte {offset}, in the middle of a tensor.")
            rest, offset = rest[done:], offset + done

    parts = [
        (direct.begin + start, direct.offset + start, min(_AT_ONCE, direct.target.nbytes - start))
        for direct in into
        for start in range(0, direct.target.nbytes, _AT_ONCE)
    ]
    by_address = sorted(into, key=lambda direct: direct.begin)
    overlap = any(one.end > next_.begin for one, next_ in itertools.pairwise(by_address))
    threads = 1 if overlap else min(len(parts), len(os.sched_getaffinity(0)), _MOST_THREADS)
    if threads > 1:
        with ThreadPoolExecutor(threads, "resilience-read") as pool:
            list(pool.map(read, *zip(*parts, strict=True)))
    else:
        for part in parts:  # what lies in one memory is filled in the order of the file
            read(*part)
    for direct in into:
        torch.autograd.graph.increment_version(direct.target)


def _load_stream(mapped: mmap.mmap, info: Any) -> Tensor:
    loaded = torch.load(
        io.BytesIO(mapped[info.offset : info.offset + info.length]), map_location="cpu", weights_only=True
    )
    assert isinstance(loaded, Tensor)
    return loaded


def _stored_sizes(entry: TensorStorageMetadata, index: MetadataIndex) -> torch.Size:
    hint = index.index
    if hint is not None and hint < len(entry.chunks) and entry.chunks[hint].offsets == index.offset:
        return entry.chunks[hint].sizes
    return next(chunk.sizes for chunk in entry.chunks if index.offset is None or chunk.offsets == index.offset)


def _canonical_metadata(metadata: Metadata) -> Metadata:
    paths = metadata.planner_data or {}
    names = {key: _canonical_key(key, paths.get(key)) for key in metadata.state_dict_metadata}
    return dataclasses.replace(
        metadata,
        state_dict_metadata={names[key]: entry for key, entry in metadata.state_dict_metadata.items()},
        planner_data={names[key]: canonical_path(path) for key, path in paths.items() if key in names} or None,
        storage_data={
            dataclasses.replace(index, fqn=names.get(index.fqn, index.fqn)): info
            for index, info in metadata.storage_data.items()
        },
    )


def _canonical_key(key: str, path: tuple[str | int, ...] | None) -> str:
    return key_of(canonical_path(path if path is not None else key.split(".", 1)))


def empty(entry: TensorStorageMetadata, device: torch.device | str = "cpu") -> Tensor:
    """An uninitialised tensor of an entry's shape and dtype."""
    return torch.empty(entry.size, dtype=entry.properties.dtype, device=device)


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
