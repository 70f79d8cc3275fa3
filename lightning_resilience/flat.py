"""A rank's state in one row: the values of nested containers by flat keys, as DCP flattens them.

::

    {"model": {"w": W}, "optimizer_0": {"state": {"w": {"step": S, "exp_avg": M}}}}

        level 0    model, optimizer_0
        level 1    w, state                              outline: these names, and which of them are containers
        level 2    w
        level 3    step, exp_avg                         ──> W, S, M

What flattening finds out is the same save after save, so it is kept as an *outline*: the names at each depth, and what
kinds of values they lead to.  A state is compared with it level by level, by a few calls that each run over all names
of a level, and not name by name: with many small tensors Python would take longer for that than the copy.  All that is
asked of tensors is asked in the same way, and of every one of them in every save.

A key is a text, and nothing is left of a container with nothing in it.  So a mapping inside a value is a container only
where it comes back from that as it was, and otherwise an object like any other; lists without tensors are, too.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, compress
from operator import attrgetter, methodcaller, not_
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.tensor import DTensor

from lightning_resilience.errors import SaveFailed
from lightning_resilience.memo import Memo

# FSDP1 hands out ShardedTensors, and torch says at each touch that it would rather not; its users cannot change that.
warnings.filterwarnings("ignore", "Please use DTensor instead", FutureWarning, module=r"lightning_resilience\.")

PLAIN = (Tensor, torch.nn.Parameter)
"""Types of tensors that are nothing but their own memory."""

State: TypeAlias = Mapping[str, Any]
"""Nested state as DCP takes it: ``{"model": {...}, "optimizer_0": {...}}``."""

Path: TypeAlias = tuple[str | int, ...]
"""The names that lead to a value."""


@dataclass(frozen=True)
class _Level:
    """The containers at one depth: their names one after the other, how many each has, and the kinds of the values.

    Attributes:
        lists: where there are lists, and whether those are containers, which depends on what is in them.
        whole: where there are mappings that are none, for the same reason, and whether there is anything in them.
            Those that are have their names compared.
        inner: for each value, whether it is a container.
        leaves: whether it is not.
    """

    sizes: list[int]
    names: list[Any]
    kinds: list[type]
    lists: list[tuple[int, bool]]
    whole: list[tuple[int, bool]]
    inner: list[bool]
    leaves: list[bool]

    @classmethod
    def of(cls, containers: Sequence[Mapping[Any, Any]], inner: list[bool]) -> _Level:
        values = _values(containers)
        lists = [(place, inner[place]) for place, value in enumerate(values) if isinstance(value, list)]
        leaves = list(map(not_, inner))
        maybe = ((place, values[place]) for place in compress(range(len(values)), leaves))
        whole = [(place, bool(value)) for place, value in maybe if isinstance(value, Mapping)]
        names, kinds = list(chain.from_iterable(containers)), list(map(type, values))
        return cls(list(map(len, containers)), names, kinds, lists, whole, inner, leaves)

    def open(self, containers: Sequence[Mapping[Any, Any]]) -> list[Any] | None:
        """The values, lists that are containers as mappings; None where the containers are others."""
        if list(map(len, containers)) != self.sizes or list(chain.from_iterable(containers)) != self.names:
            return None
        values = _values(containers)
        if list(map(type, values)) != self.kinds:
            return None
        for place, is_container in self.lists:
            if _has_tensors(values[place]) is not is_container:
                return None
            if is_container:
                values[place] = dict(enumerate(values[place]))
        for place, has_any in self.whole:
            if bool(values[place]) is not has_any or _comes_back(values[place], self.names[place]):
                return None
        return values


def _values(containers: Iterable[Mapping[Any, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(methodcaller("values"), containers)))


def _has_tensors(values: list[Any]) -> bool:
    kinds = set(map(type, values))
    if any(issubclass(kind, (Mapping, Tensor)) for kind in kinds):
        return True
    return any(issubclass(kind, list) for kind in kinds) and any(
        isinstance(value, list) and _has_tensors(value) for value in values
    )


def _comes_back(mapping: Mapping[Any, Any], name: Any) -> bool:
    """Whether a mapping inside a value, of a name, is the same again when it is made of its keys and values.

    Raises:
        SaveFailed: it is not, and neither can it be kept as an object.
    """
    if set(map(type, mapping)) == {str}:
        return True
    if holds_parts(mapping.values()):
        raise SaveFailed(
            f"{name} has parts of sharded tensors in it, and keys that are not texts: it cannot be saved.",
            stage="plan",
            hint="Use texts as its keys.",
        )
    return False


def holds_parts(values: Collection[Any]) -> bool:
    """Whether this rank's part of a sharded tensor is somewhere among values and what is in them."""
    kinds = set(map(type, values))
    if any(issubclass(kind, (DTensor, ShardedTensor)) for kind in kinds):
        return True
    inner = tuple(kind for kind in kinds if issubclass(kind, (Mapping, list, tuple, set, frozenset)))
    return bool(inner) and any(
        holds_parts(value.values() if isinstance(value, Mapping) else value)
        for value in values
        if isinstance(value, inner)
    )


class Outline:
    """How a state is built: its flat keys in DCP's order, and where their values lie.

    Args:
        paths: the names that lead to each key's value.
        values: in the order of the keys.

    Attributes:
        keys: the flat keys.
        kinds: of the values; see ``_kind_of``.
        is_tensor: for each key, whether its value is a tensor whose memory can be asked for.
        is_sharded: for each key, whether its value is a ShardedTensor.
        tensor_keys: the keys of tensors whose memory can be asked for.
        is_dtensor: for each of those, whether it is a DTensor.
        all_differ: whether the addresses that were looked at last all differ.
    """

    def __init__(self, paths: dict[str, Path], values: Iterable[Any]) -> None:
        self.paths = paths
        self.keys = tuple(paths)
        self.kinds = list(map(_kind_of, map(type, values)))
        self.is_tensor = [kind in ("plain", "dtensor", "tensor") for kind in self.kinds]
        self.is_sharded = [kind == "sharded" for kind in self.kinds]
        self.tensor_keys = tuple(compress(self.keys, self.is_tensor))
        self.is_dtensor = [kind == "dtensor" for kind in compress(self.kinds, self.is_tensor)]
        self.all_differ: Memo[bool] = Memo()
        self._levels: list[_Level] = []
        self._order: list[int] = []

    @cached_property
    def is_kept(self) -> list[bool]:
        """For each key, whether its value is what an optimizer keeps of a parameter:
        ``optimizer_<i>.state.<parameter>.<name>``."""
        return [_is_kept(path) for path in self.paths.values()]

    @cached_property
    def kept_keys(self) -> tuple[str, ...]:
        """The keys of those."""
        return tuple(compress(self.keys, self.is_kept))

    @cached_property
    def places(self) -> dict[str, int]:
        """Where each key is among them."""
        return {key: place for place, key in enumerate(self.keys)}

    def learn(self, state: State, leaves: Iterable[tuple[int, int]], inner: Iterable[list[bool]]) -> None:
        """Find the values of states like this one, from now on.

        Args:
            state: the state that this is the outline of.
            leaves: for each key, the level of its value, and which of the values there that are no containers it is.
            inner: for each level, which of the values there are containers.
        """
        containers: list[Any] = [state]
        begins = [0]
        for of_level in inner:
            level = _Level.of(containers, of_level)
            values = level.open(containers)
            assert values is not None
            containers = list(compress(values, level.inner))
            begins.append(begins[-1] + len(values) - len(containers))
            self._levels.append(level)
        self._order = [begins[level] + place for level, place in leaves]

    def values_in(self, state: State) -> list[Any] | None:
        """The values of a state in the order of the keys; None where it is not known to be built like this."""
        found: list[Any] = []
        containers: list[Any] = [state]
        for level in self._levels:
            values = level.open(containers)
            if values is None:
                return None
            found += compress(values, level.leaves)
            containers = list(compress(values, level.inner))
        return list(map(found.__getitem__, self._order)) if self._levels else None


class FlatState:
    """A rank's state as DCP flattens it: its ``outline``, and the ``values`` in the order of its keys."""

    def __init__(self, outline: Outline, values: list[Any]) -> None:
        self.outline = outline
        self.values = values

    @classmethod
    def of(cls, state: State, known: Outline | None = None) -> FlatState:
        """Flatten a state.

        Args:
            state: nested tensors and objects.
            known: the outline of an earlier state, which this one may be like.
        """
        if known is not None and (values := known.values_in(state)) is not None:
            return cls(known, values)
        walk = _Walk()
        if walk.add(state.items(), "", ()):
            outline = Outline(walk.paths, walk.values)
            outline.learn(state, walk.leaves, walk.inner)
            return cls(outline, walk.values)
        planner = DefaultSavePlanner()
        try:
            planner.set_up_planner(dict(state))
        except ValueError as error:
            raise SaveFailed(
                f"Two values have one name in the state: {error}.", stage="plan", hint="Rename one of them."
            ) from error
        paths = {key: planner.mappings[key] for key in planner.state_dict}
        return cls(Outline(paths, planner.state_dict.values()), list(planner.state_dict.values()))

    @property
    def keys(self) -> tuple[str, ...]:
        return self.outline.keys

    def __getitem__(self, key: str) -> Any:
        return self.values[self.outline.places[key]]

    def as_dict(self) -> dict[str, Any]:
        """The values by key."""
        return dict(zip(self.keys, self.values, strict=True))

    @cached_property
    def tensors(self) -> list[Tensor]:
        """Those whose memory can be asked for, as ``outline.tensor_keys`` names them."""
        return list(compress(self.values, self.outline.is_tensor))

    @cached_property
    def addresses(self) -> list[int]:
        """Where the memory of each of ``tensors`` begins."""
        return addresses_of(self.tensors)

    @property
    def kept(self) -> list[Any]:
        """What optimizers keep of parameters, as ``outline.kept_keys`` names it."""
        return list(compress(self.values, self.outline.is_kept))

    def fingerprint(self) -> tuple[Any, ...]:
        """Equal for two states exactly when one plan serves both."""
        outline = self.outline
        dtypes, shapes = (list(map(attrgetter(name), self.tensors)) for name in ("dtype", "shape"))
        placed = list(map(attrgetter("placements", "device_mesh"), compress(self.tensors, outline.is_dtensor)))
        shards = list(map(_shards_of, compress(self.values, outline.is_sharded)))
        return outline.keys, outline.kinds, dtypes, shapes, placed, shards, self._same_memory()

    def _same_memory(self) -> list[tuple[str, str]]:
        """Keys of one and the same memory, with the first key that has it."""
        addresses = self.addresses
        if self.outline.all_differ.get((addresses,), lambda: _all_differ(addresses)):
            return []
        times = Counter(addresses)
        times[0] = 0  # no memory is not the same memory
        several = [times[address] > 1 for address in addresses]
        first_seen: dict[tuple[Any, ...], str] = {}
        named = zip(compress(self.outline.tensor_keys, several), compress(self.tensors, several), strict=True)
        pairs = [(key, first_seen.setdefault(_storage_of(key, value), key)) for key, value in named]
        return [(key, first) for key, first in pairs if key != first]

    def is_on_cuda(self) -> bool:
        """Whether any of it is in the memory of a CUDA device."""
        return any(
            any(shard.tensor.is_cuda for shard in value.local_shards())
            if isinstance(value, ShardedTensor)
            else isinstance(value, Tensor) and value.is_cuda
            for value in self.values
        )

    def tied(self) -> tuple[dict[str, str], set[str]]:
        """Keys whose memory an earlier key has too (with that key), and keys where this rank cannot tell: it has no
        part."""
        tensors = ((key, value) for key, value in zip(self.keys, self.values, strict=True) if isinstance(value, Tensor))
        empty = {key for key, value in tensors if _storage_of(key, value)[0] is None}
        return dict(self._same_memory()), empty


class _Walk:
    """One look at every value of a state."""

    def __init__(self) -> None:
        self.paths: dict[str, Path] = {}
        self.values: list[Any] = []
        self.leaves: list[tuple[int, int]] = []
        self.inner: list[list[bool]] = []
        self._leaves_at: Counter[int] = Counter()

    def add(self, items: Iterable[tuple[Any, Any]], prefix: str, path: Path) -> bool:
        """Flatten as DCP does, in a fraction of its time; False where it is better left to DCP."""
        depth = len(path)
        if depth == len(self.inner):
            self.inner.append([])
        for name, value in items:
            key = f"{prefix}{name}"
            here = (*path, name)
            if type(value) not in PLAIN:
                if isinstance(value, ShardedTensor) and _is_nested(value):
                    return False
                if isinstance(value, Mapping) and (_is_part(here, value) or _comes_back(value, key)):
                    self.inner[depth].append(True)
                    if not self.add(((str(k), v) for k, v in value.items()), f"{key}.", here):
                        return False
                    continue
                if isinstance(value, list) and _has_tensors(value):
                    self.inner[depth].append(True)
                    if not self.add(enumerate(value), f"{key}.", here):
                        return False
                    continue
            if key in self.paths:
                return False
            self.inner[depth].append(False)
            self.paths[key] = here
            self.values.append(value)
            self.leaves.append((depth, self._leaves_at[depth]))
            self._leaves_at[depth] += 1
        return True


def _is_part(path: Path, mapping: Mapping[Any, Any]) -> bool:
    """Whether a mapping is part of how a state is built, rather than something inside a value: the model's state, an
    optimizer's, that of all its parameters, and that of one of them where there is none."""
    if not str(path[0]).startswith("optimizer_"):
        return len(path) == 1
    return len(path) == 1 or (path[1] == "state" and (len(path) == 2 or (len(path) == 3 and not mapping)))


def _is_nested(value: ShardedTensor) -> bool:
    return any(isinstance(shard.tensor, ShardedTensor) for shard in value.local_shards())


def addresses_of(tensors: Sequence[Tensor]) -> list[int]:
    """Where the memory of each tensor begins; of a DTensor, that of this rank's part."""
    if any(issubclass(kind, DTensor) for kind in set(map(type, tensors))):
        tensors = [value._local_tensor if isinstance(value, DTensor) else value for value in tensors]
    return list(map(Tensor.data_ptr, tensors))


def _all_differ(addresses: Sequence[int]) -> bool:
    """Whether no two tensors begin at one address; where it is 0 they have no memory at all."""
    without = addresses.count(0)
    return len(set(addresses)) == len(addresses) - max(without - 1, 0)


def _is_kept(path: Path) -> bool:
    return (
        len(path) == 4
        and path[1] == "state"
        and str(path[0]).startswith("optimizer_")
        and isinstance(path[3], str)  # in a dict, and not in a list
    )


def _kind_of(cls: type) -> str:
    """What a plan has to know of a value by its type."""
    if cls in PLAIN:
        return "plain"
    for kind, parent in (("sharded", ShardedTensor), ("dtensor", DTensor), ("tensor", Tensor)):
        if issubclass(cls, parent):
            return kind
    return "object"


def _shards_of(value: ShardedTensor) -> tuple[Any, ...]:
    shards = (tuple(shard.metadata.shard_offsets + shard.metadata.shard_sizes) for shard in value.local_shards())
    return value.dtype, value.size(), tuple(shards)


def _storage_of(key: str, value: Any) -> tuple[Any, ...]:
    """Equal for tensors that are one and the same memory, seen the same way, within one part of the state."""
    if isinstance(value, ShardedTensor) or not isinstance(value, Tensor):
        return (None, key)
    local = value.to_local() if isinstance(value, DTensor) else value
    if local.numel() == 0 or value.dim() == 0 or (address := local.data_ptr()) == 0:
        return (None, key)
    return (address, local.dtype, local.shape, local.stride(), local.device, key.partition(".")[0])
