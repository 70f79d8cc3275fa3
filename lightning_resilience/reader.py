"""A checkpoint to tensors: any DCP folder, read straight into tensors that are already there.

Keys are compared in canonical form (see ``names``), so that a checkpoint fits whatever wrapped the model when it was
saved.

What is wanted can be planned first and fetched together, in one pass over each file, in which files that nobody has
checked yet are digested.  Objects are unpickled only after that.
"""

from __future__ import annotations

import dataclasses
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from lightning_resilience.errors import CheckpointCorrupt
from lightning_resilience.filling import share_memory, takes_bytes, threads_for
from lightning_resilience.manifest import METADATA, FileEntry
from lightning_resilience.names import ObjectPath, canonical, canonical_path, key_of
from lightning_resilience.shard_file import ShardFile
from lightning_resilience.shards import collector_paused
from lightning_resilience.trusted import load_trusted

OPTIMIZER = re.compile(r"optimizer_\d+")
"""First component of the keys of an optimizer's state."""

Allocate = Callable[[ObjectPath, TensorStorageMetadata], Any]
"""Makes the tensor that an entry is read into, from its path below the part of the state and its metadata; None leaves
it out."""


@dataclass(frozen=True)
class Request:
    """Items that are wanted, and the planner that knows which tensors they are for."""

    items: Sequence[ReadItem]
    planner: LoadPlanner


@dataclass(frozen=True)
class Part:
    """A part of a checkpoint on its way into a model or an optimizer.

    Args:
        requests: what has to be fetched for it.
        install: what is to be done then.
    """

    requests: Sequence[Request]
    install: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Tree:
    """One part of the state: what is to be fetched for it, and what puts it together then, as it was when saved."""

    request: Request
    build: Callable[[], Any]


class Later(StorageReader):
    """Notes what torch's own loading routines want instead of reading it; objects are left out."""

    def __init__(self, metadata: Metadata) -> None:
        self.metadata = metadata
        self.requests: list[Request] = []

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        self.requests.append(Request([item for item in plan.items if item.type != LoadItemType.BYTE_IO], planner))
        done: Future[None] = Future()
        done.set_result(None)
        return done

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


class CheckpointReader:
    """Reads one checkpoint.

    Args:
        locate: gives the path of a file of the checkpoint by its name.
        plain: whether the shard files are this package's, whose payloads are contiguous and vouched for by digests.
        weights_only: the user's wish, as ``torch.load`` takes it; without digests True unless False was asked for.
        unchecked: what the manifest says of files, by path, that are digested in the first fetch.

    Raises:
        CheckpointCorrupt: ``.metadata`` cannot be read.
    """

    def __init__(
        self,
        locate: Callable[[str], Path],
        *,
        plain: bool,
        weights_only: bool | None = None,
        unchecked: Mapping[Path, FileEntry] = {},
    ) -> None:
        self._locate = lru_cache(None)(locate)  # asked for once a tensor
        self._plain = plain
        self._weights_only = weights_only if plain else weights_only is not False
        self._unchecked = dict(unchecked)
        self._ahead: dict[str, Tensor] = {}
        path = locate(METADATA)
        try:
            with collector_paused():
                self.metadata = _canonical_metadata(pickle.loads(path.read_bytes()))
        except Exception as error:
            raise CheckpointCorrupt(f"{path} cannot be read: {type(error).__name__}: {error}.") from error
        self.paths: dict[str, ObjectPath] = self.metadata.planner_data or {
            key: tuple(key.split(".", 1)) for key in self.metadata.state_dict_metadata
        }
        """DCP object path of each key."""

    def _entries(self, part: str) -> Iterator[tuple[str, ObjectPath, TensorStorageMetadata | BytesStorageMetadata]]:
        """What there is of one part of the state: key, DCP object path and description."""
        for key, path in self.paths.items():
            if path[0] == part and (entry := self.metadata.state_dict_metadata.get(key)) is not None:
                yield key, path, entry

    # -- what is there ------------------------------------------------------------------------------------------------

    def shapes(self, part: str = "model") -> dict[str, tuple[int, ...] | None]:
        """Names in one part of the state, with their shape; None for an object."""
        return {
            key_of(path[1:]): tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None
            for _, path, entry in self._entries(part)
        }

    @property
    def optimizers(self) -> int:
        """How many optimizers the checkpoint has the state of."""
        parts = {path[0] for path in self.paths.values()}
        return sum(1 for part in parts if OPTIMIZER.fullmatch(str(part)))

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

    def request(self, targets: Mapping[str, Any]) -> Request:
        """Ask for tensors to be filled in place.

        Args:
            targets: tensors of the checkpoint's global shapes (plain, DTensor or ShardedTensor) by canonical key.
        """
        planner = self._planner(targets)
        with collector_paused():
            return Request(planner.create_local_plan().items, planner)

    @torch.no_grad()
    def fetch(self, requests: Iterable[Request]) -> None:
        """Read what was asked for; the first time, all of the files that nobody has checked yet.

        Raises:
            CheckpointCorrupt: one of those is not what its manifest says, and what was filled from it of no use.
        """
        where = self.metadata.storage_data
        by_name: dict[str, list[tuple[ReadItem, LoadPlanner]]] = {}
        for request in requests:
            for item in request.items:
                by_name.setdefault(where[item.storage_index].relative_path, []).append((item, request.planner))
        by_file: dict[Path, list[tuple[ReadItem, LoadPlanner]]] = {path: [] for path in self._unchecked}
        by_file |= {self._locate(name): wanted for name, wanted in by_name.items()}
        with collector_paused():
            files = {path: self._open(path, wanted) for path, wanted in by_file.items()}
            self._check({path: files[path] for path in self._unchecked})
            for file in files.values():
                file.finish()

    def _open(self, path: Path, wanted: Iterable[tuple[ReadItem, LoadPlanner]]) -> ShardFile:
        where = self.metadata.storage_data
        in_order = sorted(wanted, key=lambda one: where[one[0].storage_index].offset)
        return ShardFile(path, self.metadata, in_order, plain=self._plain, weights_only=self._weights_only)

    def _check(self, files: Mapping[Path, ShardFile]) -> None:
        """Fill from files, side by side, that are digested on the way."""
        entries, self._unchecked = self._unchecked, {}
        threads = 1 if share_memory(span for file in files.values() for span in file.spans) else threads_for(len(files))
        with ThreadPoolExecutor(threads, "resilience-read") as pool:
            told = pool.map(lambda path: files[path].fill_and_check(entries[path]), files)
        if problems := tuple(problem for problem in told if problem is not None):
            raise CheckpointCorrupt(f"{'; '.join(problems)}.", problems=problems)

    def read_into(self, targets: Mapping[str, Any]) -> None:
        """Fill tensors in place; see ``request``."""
        self.fetch([self.request(targets)])

    def fetch_ahead(self, part: re.Pattern[str]) -> Request:
        """Ask for tensors of files that nobody has checked yet before it is known where they belong, so that those
        files are read once.  They are kept, in host memory, for the ``tree`` that wants them.

        Args:
            part: matches the first component of their keys.
        """
        where: dict[str, set[Path]] = {}
        for index, info in self.metadata.storage_data.items():
            where.setdefault(index.fqn, set()).add(self._locate(info.relative_path))
        self._ahead = {
            key: empty(entry)
            for key, entry in self.metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
            and part.fullmatch(str(self.paths[key][0]))
            and where.get(key, set()) & self._unchecked.keys()
        }
        return self.request(self._ahead)

    def _planner(self, targets: Mapping[str, Any]) -> DefaultLoadPlanner:
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(targets), self.metadata)
        return planner

    def read_object(self, key: str) -> Any:
        """A value that is not a tensor."""
        info = self.metadata.storage_data[MetadataIndex(key)]
        with open(self._locate(info.relative_path), "rb") as stream:
            stream.seek(info.offset)
            return load_trusted(stream.read(info.length), self._weights_only)

    def tree(self, part: str, allocate: Allocate | None = None) -> Tree:
        """One part of the state as it was nested when saved.

        Args:
            part: first component of the keys, e.g. ``optimizer_0``.
            allocate: makes its tensors; whole ones on the CPU if None.
        """
        tensors, targets = dict[str, Any](), dict[str, Any]()
        for key, path, entry in self._entries(part):
            if not isinstance(entry, TensorStorageMetadata):
                continue
            value = allocate(path[1:], entry) if allocate is not None else empty(entry)
            if value is None:
                continue
            ahead = self._ahead.pop(key, None)
            if ahead is None:
                targets[key] = value
            elif value.device == ahead.device and takes_bytes(ahead, value):
                value = ahead
            else:
                value.copy_(ahead)
            tensors[key] = value

        def build() -> Any:
            tree: dict[str, Any] = {}
            for key, path, entry in self._entries(part):
                if key in tensors:
                    set_element(tree, path, tensors[key])
                elif isinstance(entry, BytesStorageMetadata):
                    set_element(tree, path, self.read_object(key))
            return tree.get(part, {})

        return Tree(self.request(targets), build)

    def read_tree(self, part: str, allocate: Allocate | None = None) -> Any:
        """``tree``, fetched and put together."""
        tree = self.tree(part, allocate)
        self.fetch([tree.request])
        return tree.build()

    def read_full(self, part: str = "model") -> dict[str, Any]:
        """One part of the state as it was saved, whole and on the CPU."""
        tree: dict[str, Any] = self.read_tree(part)
        return tree

    def read_objects(self, part: str, tree: dict[str, Any]) -> None:
        """Put those values of one part that are not tensors into ``tree``, which has it under its name."""
        for key, path, entry in self._entries(part):
            if isinstance(entry, BytesStorageMetadata):
                set_element(tree, path, self.read_object(key))

    @property
    def is_flat(self) -> bool:
        """Whether the model's state is nothing but tensors, one a name."""
        return all(
            len(path) == 2 and isinstance(entry, TensorStorageMetadata) for _, path, entry in self._entries("model")
        )


def _canonical_metadata(metadata: Metadata) -> Metadata:
    paths = metadata.planner_data or {}
    names = {key: _canonical_key(key, paths.get(key)) for key in metadata.state_dict_metadata}
    renamed = {key: name for key, name in names.items() if key != name}
    return dataclasses.replace(
        metadata,
        state_dict_metadata={names[key]: entry for key, entry in metadata.state_dict_metadata.items()},
        planner_data={names[key]: canonical_path(path) for key, path in paths.items() if key in names} or None,
        # As long as there are ranks and tensors; mostly there is nothing to do.
        storage_data={
            dataclasses.replace(index, fqn=renamed[index.fqn]) if index.fqn in renamed else index: info
            for index, info in metadata.storage_data.items()
        }
        if renamed
        else metadata.storage_data,
    )


def _canonical_key(key: str, path: ObjectPath | None) -> str:
    return key_of(canonical_path(path if path is not None else key.split(".", 1)))


def empty(entry: TensorStorageMetadata, device: torch.device | str = "cpu") -> Tensor:
    """An uninitialised tensor of an entry's shape and dtype."""
    return torch.empty(entry.size, dtype=entry.properties.dtype, device=device)
