"""Lightning's strategies: what their state is, and how it is loaded.

A *family* knows one kind of strategy: single device and DDP (plain tensors), FSDP (``ShardedTensor``), and
ModelParallel with FSDP2 and tensor parallelism (``DTensor``).  Keys are those that stock Lightning writes, so stock
readers find them, with optimizer state by parameter name on every strategy, so that any can load what any other
saved.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import compress
from operator import attrgetter, is_, ne, not_
from typing import Any, Protocol

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import DoublePrecision
from lightning.pytorch.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from torch import Tensor
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_resilience.errors import SetupError
from lightning_resilience.flat import FlatState, addresses_of
from lightning_resilience.memo import Memo
from lightning_resilience.model_loading import by_module, in_place, loads_plainly
from lightning_resilience.module_state import ModuleState, parameters, versions_of
from lightning_resilience.named_optimizers import (
    named_by_position,
    named_optimizer,
    named_optimizer_state,
    raw_optimizer,
    steps_to_host,
    without_gaps,
)
from lightning_resilience.names import canonical
from lightning_resilience.reader import CheckpointReader, Later, Part

UNSUPPORTED = {
    "DeepSpeedStrategy": "DeepSpeed keeps its own checkpoint format; use FSDPStrategy or ModelParallelStrategy.",
    "XLAStrategy": "XLA devices are not supported; use FSDPStrategy, ModelParallelStrategy or DDPStrategy on GPUs.",
    "SingleDeviceXLAStrategy": "XLA devices are not supported; use a CPU or GPU.",
    "XLAFSDPStrategy": "XLA devices are not supported; use FSDPStrategy on GPUs.",
}


class Family(Protocol):
    """One kind of strategy."""

    prefix: str
    """First component of the model's keys."""

    loads_late: bool
    """Whether a checkpoint is loaded after the model is wrapped and the optimizers exist, all at once."""

    def model_state(self) -> dict[str, Any]:
        """This rank's part of the model; references, not copies, where the strategy allows it."""

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """This rank's part of an optimizer's state: ``{"state": {parameter name: {…}}, "param_groups": […]}``."""

    def begin(self) -> None:
        """Training begins: what is frozen is the same on all ranks now, whatever becomes of it."""

    def thawed(self) -> list[str]:
        """Names of the parameters that are trained by now, and were not when training began."""

    def identical(self, flat: FlatState) -> frozenset[str]:
        """Keys of plain tensors that all ranks hold bit for bit."""

    def still(self, flat: FlatState) -> frozenset[str]:
        """Keys of tensors that nothing but an optimizer's step changes, in training as it is meant to be."""

    def trained(self, flat: FlatState) -> frozenset[str]:
        """Keys of the model's parameters and their moments: no buffers, which may be infinite (masks are), and no
        frozen ones."""

    def files_to_read(self, reader: CheckpointReader) -> set[str]:
        """Names of the shard files that this rank's part is in, where a checkpoint ``loads_late``.  Collective."""

    def model_part(self, reader: CheckpointReader, strict: bool) -> Part:
        """The model, on its way into the one that is there.

        Raises:
            CheckpointIncompatible: names or shapes do not fit, with both sides listed; or on installing.
        """

    def optimizer_part(self, reader: CheckpointReader, index: int, optimizer: Optimizer) -> Part:
        """An optimizer's state: what the checkpoint has; parameters without state in it start fresh.

        Raises:
            CheckpointIncompatible: the optimizer has other parameter groups; on installing.
        """


class _Equal:
    """Which parameters are equal on all ranks of DDP.

    Args:
        names: of all parameters.
        trainable: whether each is.
        ignored: names of those that DDP leaves to the user.
        begun: by name, whether a parameter was trainable when training began, and its version then.

    Attributes:
        kept: names of those that DDP keeps equal: it gathers the gradients of what was trainable when it began.
        loose: names of the others.
        is_loose: for each name whether it is one of them.
        versions: of those, while they are equal; such as they never have where they are not.
    """

    def __init__(
        self,
        names: Sequence[str],
        trainable: Sequence[bool],
        ignored: Collection[str],
        begun: Mapping[str, tuple[bool, int | None]],
    ) -> None:
        is_kept = [
            is_trainable and name not in ignored and begun.get(name, (False, None))[0]
            for name, is_trainable in zip(names, trainable, strict=True)
        ]
        self.is_loose = list(map(not_, is_kept))
        self.kept = list(compress(names, is_kept))
        self.loose = list(compress(names, self.is_loose))
        versions = [None if name in ignored else begun.get(name, (False, None))[1] for name in self.loose]
        self.versions = [-1 if version is None else version for version in versions]


class PlainFamily:
    """Single device and DDP: every rank has all of the state."""

    prefix = "model"
    loads_late = False

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._model = ModuleState()
        self._begun: dict[str, tuple[bool, int | None]] = {}
        self._frozen: dict[str, torch.nn.Parameter] = {}
        self._equal: Memo[_Equal] = Memo()
        self._identical: Memo[frozenset[str]] = Memo()
        self._still: Memo[frozenset[str]] = Memo()

    @property
    def module(self) -> LightningModule:
        module = self._strategy.lightning_module
        assert module is not None
        return module

    def model_state(self) -> dict[str, Any]:
        return self._model.state_dict(self.module)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return named_optimizer_state(self.module, optimizer)

    def begin(self) -> None:
        found = parameters(self.module)
        trainable = map(attrgetter("requires_grad"), found.values())
        self._begun = dict(zip(found, zip(trainable, versions_of(found.values()), strict=True), strict=True))
        self._frozen = {name: one for name, one in found.items() if not one.requires_grad}

    def thawed(self) -> list[str]:
        return [canonical(name) for name, one in self._frozen.items() if one.requires_grad]

    def identical(self, flat: FlatState) -> frozenset[str]:
        """What DDP keeps equal, and those moments; not buffers, of which rank 0's are the ones it broadcasts.

        It takes care of trainable parameters alone.  Frozen ones are equal as long as nobody has changed them.
        """
        model, strategy = self._model, self._strategy
        names = model.parameters
        if not isinstance(strategy, DDPStrategy):
            return self._identical.get((flat.outline, names), lambda: self._keys(flat, names, names))
        if strategy._model_averager is not None:
            return frozenset()  # ranks go their own ways between two averages
        ignored = frozenset(getattr(strategy.model, "parameters_to_ignore", ()))
        equal = self._equal.get(
            (names, model.trainable, ignored), lambda: _Equal(names, model.trainable, ignored, self._begun)
        )
        changed = list(map(ne, compress(model.versions, equal.is_loose), equal.versions))
        return self._identical.get(
            (flat.outline, equal, changed),
            lambda: self._keys(flat, [*equal.kept, *compress(equal.loose, map(not_, changed))], equal.kept),
        )

    def _keys(self, flat: FlatState, names: Iterable[str], stepped: Iterable[str]) -> frozenset[str]:
        """Those of parameters, and of the moments of those that are ``stepped``."""
        owners = set(map(canonical, stepped))
        moments = (key for key, _ in _moments(flat) if flat.outline.paths[key][2] in owners)
        return frozenset([*(f"{self.prefix}.{name}" for name in names), *moments])

    def still(self, flat: FlatState) -> frozenset[str]:
        """The trainable parameters that optimizers own, and what those keep of them.

        By their memory, not by name: callbacks put other tensors in the place of parameters, such as averages.
        """
        optimizers = [raw_optimizer(optimizer) for optimizer in self._strategy.optimizers]
        groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
        owned = addresses_of([parameter for group in groups for parameter in group if parameter.requires_grad])
        entries = itertools.chain.from_iterable(optimizer.state.values() for optimizer in optimizers)
        live = list(itertools.chain.from_iterable(map(_values_of, entries)))
        kept = flat.kept
        links = None if _are_the_same(live, kept) else ([*map(id, live)], [*map(id, kept)])
        return self._still.get(
            (flat.outline, flat.addresses, owned, links), lambda: frozenset(_still(flat, owned, live))
        )

    def trained(self, flat: FlatState) -> frozenset[str]:
        frozen = {canonical(name) for name, parameter in self.module.named_parameters() if not parameter.requires_grad}
        frozen |= {canonical(name) for name, _ in self.module.named_buffers()}
        names = {path[1]: key for key, path in flat.outline.paths.items() if path[0] == self.prefix and len(path) == 2}
        model = {key for name, key in names.items() if canonical(str(name)) not in frozen}
        moments = {key for key, value in _kept(flat) if isinstance(value, Tensor) and value.dim()}
        return frozenset(model | moments)

    def files_to_read(self, reader: CheckpointReader) -> set[str]:
        return reader.files_for(self.model_state())

    def model_part(self, reader: CheckpointReader, strict: bool) -> Part:
        if isinstance(self._strategy.precision_plugin, DoublePrecision):
            self.module.double()  # Lightning does so after it has loaded, when half of each number would be lost
        if loads_plainly(self.module) and reader.is_flat:
            return in_place(self.module.state_dict(), reader, strict)
        return by_module(self.module, self.module.state_dict(), reader, strict)

    def optimizer_part(self, reader: CheckpointReader, index: int, optimizer: Optimizer) -> Part:
        return named_optimizer(self.module, reader, index, optimizer, self._strategy.optimizers)


class ModelParallelFamily(PlainFamily):
    """FSDP2 and tensor parallelism: DTensors, whose state dict refers to the parameters and needs no communication."""

    prefix = "state_dict"
    loads_late = True

    def identical(self, flat: FlatState) -> frozenset[str]:
        return _single_numbers(flat)


class FSDPFamily(PlainFamily):
    """FSDP1: sharded state dicts, which communicate."""

    loads_late = True

    def _sharded(self) -> AbstractContextManager[None]:
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
        from torch.distributed.fsdp.api import ShardedOptimStateDictConfig, ShardedStateDictConfig, StateDictType

        # Left on the device: staging copies it to the host, once.
        return FSDP.state_dict_type(
            self._wrapped,
            StateDictType.SHARDED_STATE_DICT,
            ShardedStateDictConfig(offload_to_cpu=False),
            ShardedOptimStateDictConfig(offload_to_cpu=False),
        )

    @property
    def _wrapped(self) -> torch.nn.Module:
        model = self._strategy.model
        assert model is not None
        return model

    def model_state(self) -> dict[str, Any]:
        with self._sharded():
            return self._wrapped.state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

        optimizer = raw_optimizer(optimizer)
        with self._sharded():
            return FSDP.optim_state_dict(self._wrapped, optimizer, without_gaps(optimizer))

    def identical(self, flat: FlatState) -> frozenset[str]:
        return _single_numbers(flat)

    def still(self, flat: FlatState) -> frozenset[str]:
        """What is sharded: the state dicts hold copies of it, that nobody else refers to."""
        return frozenset(compress(flat.keys, flat.outline.is_sharded))

    def files_to_read(self, reader: CheckpointReader) -> set[str]:
        """torch loads an optimizer's state that is a single number on every rank, whoever has the parameter."""
        model = self.model_state().items()
        return reader.files_for({name: value for name, value in model if math.prod(value.size()) > 1})

    def model_part(self, reader: CheckpointReader, strict: bool) -> Part:
        with self._sharded():
            part = by_module(self._wrapped, self._wrapped.state_dict(), reader, strict)

        def install() -> None:
            with self._sharded():
                part.install()

        return Part(part.requests, install)

    def optimizer_part(self, reader: CheckpointReader, index: int, optimizer: Optimizer) -> Part:
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

        optimizer = raw_optimizer(optimizer)
        key = f"optimizer_{index}"
        later = Later(reader.metadata)
        with self._sharded():
            loaded = load_sharded_optimizer_state_dict(self._wrapped.state_dict(), key, later)

        def install() -> None:
            reader.read_objects(key, loaded)
            saved = loaded.get(key, {})
            saved.setdefault("state", {})
            saved = {"state": named_by_position(self.module, saved), "param_groups": saved["param_groups"]}
            with self._sharded():
                native = FSDP.optim_state_dict_to_load(self._wrapped, optimizer, saved)
                steps_to_host(native)  # torch has read them to the device
                optimizer.load_state_dict(native)

        return Part(later.requests, install)


def family_of(strategy: Strategy) -> Family:
    """The family of a strategy.

    Raises:
        SetupError: it is not supported; says what to use.
    """
    names = [cls.__name__ for cls in type(strategy).__mro__]
    for name, why in UNSUPPORTED.items():
        if name in names:
            raise SetupError(f"ResilientCheckpoint cannot serve {names[0]}.", hint=why)
    if isinstance(strategy, FSDPStrategy):
        return FSDPFamily(strategy)
    if isinstance(strategy, ModelParallelStrategy):
        return ModelParallelFamily(strategy)
    if isinstance(strategy, (DDPStrategy, SingleDeviceStrategy)):
        return PlainFamily(strategy)
    raise SetupError(
        f"ResilientCheckpoint does not know {names[0]}.",
        hint="Use a single device, DDPStrategy, FSDPStrategy or ModelParallelStrategy, or a subclass of one of them.",
    )


def _kept(flat: FlatState) -> Iterator[tuple[str, Any]]:
    """What optimizers keep of each parameter, by key."""
    return zip(flat.outline.kept_keys, flat.kept, strict=True)


def _values_of(entry: Any) -> Iterable[Any]:
    return entry.values() if isinstance(entry, dict) else ()


def _are_the_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether they are the same objects."""
    return len(some) == len(others) and all(map(is_, some, others))


def _still(flat: FlatState, owned: Iterable[int], live: Iterable[Any]) -> Iterator[str]:
    """The keys of tensors at ``owned`` addresses, and of what is kept and ``live``."""
    addresses, ids = {*owned} - {0}, set(map(id, live))
    placed = zip(flat.outline.tensor_keys, flat.addresses, strict=True)
    yield from (key for key, address in placed if address in addresses)
    yield from (key for key, value in _kept(flat) if id(value) in ids)


def _moments(flat: FlatState) -> Iterator[tuple[str, Tensor]]:
    for key, value in _kept(flat):
        if isinstance(value, Tensor) and not isinstance(value, DTensor):
            yield key, value


def _single_numbers(flat: FlatState) -> frozenset[str]:
    """Step counters and the like, which are all that sharded ranks hold alike: a plain parameter in a sharded model is
    its user's to keep equal."""
    return frozenset(key for key, value in _moments(flat) if value.dim() == 0)
