"""Lightning's strategies: what their state is, and how it is loaded.

A *family* knows one kind of strategy: single device and DDP (plain tensors), FSDP (``ShardedTensor``), and
ModelParallel with FSDP2 and tensor parallelism (``DTensor``).  Keys are those that stock Lightning writes, so stock
readers find them, with optimizer state by parameter name on every strategy, so that any can load what any other
saved.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import compress
from operator import is_
from typing import Any, Protocol

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.optim import Optimizer

from lightning_resilience.errors import CheckpointIncompatible, SetupError
from lightning_resilience.flat import FlatState, addresses_of
from lightning_resilience.memo import Memo
from lightning_resilience.module_state import ModuleState, parameters
from lightning_resilience.reader import CheckpointReader, Later, Request, canonical, empty

UNSUPPORTED = {
    "DeepSpeedStrategy": "DeepSpeed keeps its own checkpoint format; use FSDPStrategy or ModelParallelStrategy.",
    "XLAStrategy": "XLA devices are not supported; use FSDPStrategy, ModelParallelStrategy or DDPStrategy on GPUs.",
    "SingleDeviceXLAStrategy": "XLA devices are not supported; use a CPU or GPU.",
    "XLAFSDPStrategy": "XLA devices are not supported; use FSDPStrategy on GPUs.",
}


@dataclass(frozen=True)
class Part:
    """A part of a checkpoint on its way into a model or an optimizer.

    Args:
        requests: what has to be fetched for it.
        install: what is to be done then.
    """

    requests: Sequence[Request]
    install: Callable[[], None] = lambda: None


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


class PlainFamily:
    """Single device and DDP: every rank has all of the state."""

    prefix = "model"
    loads_late = False

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._model = ModuleState()
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

    def identical(self, flat: FlatState) -> frozenset[str]:
        """Parameters and moments, which DDP keeps equal; not buffers, of which rank 0's are the ones it broadcasts."""
        names = self._model.parameters
        return self._identical.get(
            (flat.outline, names),
            lambda: frozenset([f"{self.prefix}.{name}" for name in names] + [key for key, _ in _moments(flat)]),
        )

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
        if loads_plainly(self.module) and reader.is_flat:
            return in_place(self.module.state_dict(), reader, strict)
        return by_module(self.module, self.module.state_dict(), reader, strict)

    def optimizer_part(self, reader: CheckpointReader, index: int, optimizer: Optimizer) -> Part:
        return named_optimizer(self.module, reader, index, optimizer)


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
            return FSDP.optim_state_dict(self._wrapped, optimizer, _without_gaps(optimizer))

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
            saved = {"state": _named_by_position(self.module, saved), "param_groups": saved["param_groups"]}
            with self._sharded():
                optimizer.load_state_dict(FSDP.optim_state_dict_to_load(self._wrapped, optimizer, saved))

        return Part(later.requests, install)


def _without_gaps(optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's state dict with zeros where a trainable parameter has no state yet, which FSDP refuses to gather.

    To an optimizer that is as good as no state.  Parameters of which this rank has no part have none either, rightly.
    """
    native = optimizer.state_dict()
    pattern: dict[str, Any] = next(iter(native["state"].values()), {})
    for saved, live in zip(native["param_groups"], optimizer.param_groups, strict=True):
        for number, parameter in zip(saved["params"], live["params"], strict=True):
            if pattern and parameter.requires_grad and parameter.numel() and number not in native["state"]:
                native["state"][number] = {
                    key: torch.zeros_like(parameter if value.dim() else value) if isinstance(value, Tensor) else value
                    for key, value in pattern.items()
                }
    return native


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


# -- models -----------------------------------------------------------------------------------------------------------


def in_place(state: Mapping[str, Any], reader: CheckpointReader, strict: bool) -> Part:
    """The model's tensors, on their way into those of ``state``.

    Raises:
        CheckpointIncompatible: names or shapes do not fit, with both sides listed.
    """
    wanted = {canonical(name): value for name, value in state.items()}
    saved = reader.shapes("model")
    check_fit(wanted, saved, strict)
    targets = {
        f"model.{name}": value
        for name, value in wanted.items()
        if saved.get(name) is not None and isinstance(value, Tensor)
    }
    return Part([reader.request(targets)])


def by_module(module: torch.nn.Module, state: Mapping[str, Any], reader: CheckpointReader, strict: bool) -> Part:
    """A state dict like ``state``, on its way to ``load_state_dict``, with all its hooks and extra states.

    Raises:
        CheckpointIncompatible: names or shapes do not fit, with both sides listed; on installing.
    """
    live = {canonical(name): (name, value) for name, value in state.items()}

    def allocate(path: tuple[str | int, ...], entry: TensorStorageMetadata) -> Tensor:
        _, value = live.get(str(path[0]), ("", None))
        alike = isinstance(value, Tensor) and not is_lazy(value) and len(path) == 1 and value.shape == entry.size
        # Sharded tensors are read in place: they are this strategy's own copies, or cannot be made anew.
        if alike and isinstance(value, ShardedTensor):
            return value
        return torch.empty_like(value.detach()) if alike else empty(entry)

    with torch.no_grad():
        tree = reader.tree("model", allocate)

    def install() -> None:
        saved = tree.build()
        for name, (_, value) in live.items():
            if name.endswith("_extra_state"):
                saved.setdefault(name, value)  # an empty container, of which DCP keeps nothing
        fits = {name: tuple(value.shape) if isinstance(value, Tensor) else None for name, value in saved.items()}
        known = {
            name: None if is_lazy(value) or name.endswith("_extra_state") else value
            for name, (_, value) in live.items()
        }
        check_fit(known, fits, strict)
        module.load_state_dict({live[n][0] if n in live else n: value for n, value in saved.items()}, strict=strict)

    return Part([tree.request], install)


def is_lazy(value: Any) -> bool:
    """Whether a parameter has no shape yet."""
    return isinstance(value, (UninitializedParameter, UninitializedBuffer))


def loads_plainly(module: torch.nn.Module) -> bool:
    """Whether loading a state dict into a module is copying its tensors, and nothing of the user's has a say in it."""
    if any(is_lazy(value) or not isinstance(value, Tensor) for value in module.state_dict().values()):
        return False
    hooks = ("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
    methods = ("_load_from_state_dict", "_save_to_state_dict", "get_extra_state", "set_extra_state", "load_state_dict")
    for part in module.modules():
        ours = (getattr(hook, "hook", hook) for name in hooks for hook in getattr(part, name, {}).values())
        code = itertools.chain(ours, (getattr(type(part), name) for name in methods))
        if not all(str(getattr(one, "__module__", "torch.")).startswith("torch.") for one in code):
            return False
    return True


def check_fit(wanted: Mapping[str, Any], saved: Mapping[str, tuple[int, ...] | None], strict: bool) -> None:
    """Raise CheckpointIncompatible, listing both sides, unless a model's state fits the saved shapes."""
    shapes = {name: tuple(value.shape) if isinstance(value, Tensor) else None for name, value in wanted.items()}
    wrong = [
        f"{name}: checkpoint {saved[name]}, model {shape}"
        for name, shape in shapes.items()
        if name in saved and saved[name] != shape and None not in (saved[name], shape)
    ]
    missing = [name for name in shapes if name not in saved] if strict else []
    unexpected = [name for name in saved if name not in shapes] if strict else []
    if wrong or missing or unexpected:
        parts = (
            ("different shapes", wrong),
            ("only in the model", [f"{name} {shapes[name]}" for name in missing]),
            ("only in the checkpoint", [f"{name} {saved[name]}" for name in unexpected]),
        )
        raise CheckpointIncompatible(
            "The checkpoint is of another model: "
            + "; ".join(f"{what}: {_some(names)}" for what, names in parts if names)
            + ".",
            hint="Use the model it was saved from"
            + ("." if wrong else ", or set strict_loading = False in the LightningModule to load what fits."),
        )


def _some(names: Sequence[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def edits_loaded_state(trainer: Trainer) -> bool:
    """Whether user code may look at or change the loaded state dict before it reaches the model."""
    module = trainer.lightning_module
    overridden = is_overridden("on_load_checkpoint", module) or is_overridden(
        "load_state_dict", module, torch.nn.Module
    )
    ours = (ModelCheckpoint,)
    return overridden or any(
        is_overridden("on_load_checkpoint", callback, Callback)
        for callback in trainer.callbacks  # type: ignore[attr-defined]  # set by Lightning, untyped
        if not isinstance(callback, ours)
    )


# -- optimizers -------------------------------------------------------------------------------------------------------


def raw_optimizer(optimizer: Any) -> Optimizer:
    """The torch optimizer inside Lightning's wrapper."""
    inner = getattr(optimizer, "_optimizer", optimizer)
    assert isinstance(inner, Optimizer)
    return inner


def parameter_names(module: torch.nn.Module, optimizer: Optimizer) -> dict[Tensor, str]:
    """A name for each parameter of an optimizer: the module's, or its place for one that the module does not know."""
    names = _names_by_group(module, optimizer)
    groups = zip(names, optimizer.param_groups, strict=True)
    return {parameter: name for named, group in groups for name, parameter in zip(named, group["params"], strict=True)}


def _names_by_group(module: torch.nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """See ``parameter_names``; of each group, in the order of its parameters."""
    known = {id(parameter): canonical(name) for name, parameter in reversed(parameters(module).items())}
    return [
        [known.get(id(parameter)) or f"unnamed.{group}.{place}" for place, parameter in enumerate(entry["params"])]
        for group, entry in enumerate(optimizer.param_groups)
    ]


def named_optimizer_state(module: torch.nn.Module, optimizer: Any) -> dict[str, Any]:
    """An optimizer's state by parameter name, as FSDP's optimizer state dicts have it; references, not copies."""
    optimizer = raw_optimizer(optimizer)
    names = _names_by_group(module, optimizer)
    native = optimizer.state_dict()  # runs the optimizer's own hooks
    if "param_groups" not in native:
        return {}  # Lightning's stand-in where there is no optimizer
    groups = list(zip(native["param_groups"], names, strict=True))
    by_number = {number: name for group, named in groups for number, name in zip(group["params"], named, strict=True)}
    return {
        **native,
        "state": {by_number.get(number, number): value for number, value in native["state"].items()},
        "param_groups": [{**group, "params": named} for group, named in groups],
    }


def named_optimizer(module: torch.nn.Module, reader: CheckpointReader, index: int, optimizer: Any) -> Part:
    """Undoes ``named_optimizer_state``: tensors are read straight to the device and placement of their parameter.

    Raises:
        CheckpointIncompatible: the optimizer has other parameter groups; on installing.
    """
    optimizer = raw_optimizer(optimizer)
    names = parameter_names(module, optimizer)
    by_name = {name: parameter for parameter, name in names.items()}
    in_order = list(names.values())

    all_names = {canonical(name) for name, _ in module.named_parameters()}

    def allocate(path: tuple[str | int, ...], entry: TensorStorageMetadata) -> Tensor | None:
        name = _name_at(path, in_order)
        parameter = by_name.get(name) if name is not None else None
        if parameter is None:
            return None if name in all_names else empty(entry)  # of a parameter that is not optimized any more
        if parameter.shape == entry.size and len(entry.size):
            return torch.empty_like(parameter.detach(), dtype=entry.properties.dtype)
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        return empty(entry, local.device if len(entry.size) else "cpu")

    with torch.no_grad():
        tree = reader.tree(f"optimizer_{index}", allocate)

    def install() -> None:
        saved = tree.build()
        saved["state"] = _named_by_position(module, saved, in_order)
        groups = saved.get("param_groups", [])
        if len(groups) != len(optimizer.param_groups):
            raise CheckpointIncompatible(
                f"Optimizer {index} has {len(optimizer.param_groups)} parameter groups, the checkpoint {len(groups)}.",
                hint="Configure the optimizer as it was when the checkpoint was saved.",
            )
        numbers = {name: number for number, name in enumerate(in_order)}
        unknown = saved["state"].keys() - numbers.keys() - all_names
        state: dict[Any, Any] = {numbers[n]: value for n, value in saved["state"].items() if n in numbers}
        state |= {name: value for name, value in saved["state"].items() if name in unknown}
        live_groups = [
            {**group, "params": [numbers[names[parameter]] for parameter in live["params"]]}
            for group, live in zip(groups, optimizer.param_groups, strict=True)
        ]
        optimizer.load_state_dict({**saved, "state": state, "param_groups": live_groups})
        _undo_casts(optimizer, {by_name[name]: value for name, value in saved["state"].items() if name in by_name})

    return Part([tree.request], install)


def _undo_casts(optimizer: Optimizer, saved: Mapping[Tensor, Any]) -> None:
    """Put back what ``Optimizer.load_state_dict`` cast to the parameter's dtype: 32-bit moments of 16-bit
    parameters."""
    for parameter, state in saved.items():
        if not isinstance(state, dict):
            continue
        live = optimizer.state[parameter]
        for key, value in state.items():
            if isinstance(value, Tensor) and isinstance(live.get(key), Tensor) and live[key].dtype != value.dtype:
                live[key] = value.to(live[key].device)


def _name_at(path: tuple[str | int, ...], in_order: Sequence[str]) -> str | None:
    """The parameter that an entry at ``("state", parameter, …)`` belongs to."""
    if len(path) < 2 or path[0] != "state":
        return None
    name = str(path[1])
    return in_order[int(name)] if name.isdigit() and int(name) < len(in_order) else name


def _named_by_position(
    module: torch.nn.Module, saved: Mapping[str, Any], in_order: Sequence[str] = ()
) -> dict[str, Any]:
    """Optimizer state by name also where it was saved by number (plain ``Optimizer.state_dict``)."""
    state = saved.get("state", {})
    if not in_order:
        in_order = [canonical(name) for name, parameter in module.named_parameters() if parameter.requires_grad]
    return {(_name_at(("state", key), in_order) or str(key)): value for key, value in state.items()}


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
