"""An optimizer's state by the names of parameters, and back: by number it fits one order of one optimizer only."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_resilience.errors import CheckpointIncompatible
from lightning_resilience.module_state import parameters
from lightning_resilience.names import canonical
from lightning_resilience.reader import CheckpointReader, Part, empty

OF_ANY_KIND = frozenset(
    ("params", "param_names", "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr")
)
"""Entries of a parameter group that are not options of a kind of optimizer: schedulers put them there."""


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


def named_optimizer(
    module: torch.nn.Module, reader: CheckpointReader, index: int, optimizer: Any, all_optimizers: Sequence[Any] = ()
) -> Part:
    """Undoes ``named_optimizer_state``: tensors are read straight to the device and placement of their parameter.

    Args:
        module: the model.
        reader: of the checkpoint.
        index: which of the checkpoint's optimizers it is.
        optimizer: the optimizer.
        all_optimizers: it and those beside it.

    Raises:
        CheckpointIncompatible: the optimizer has other parameter groups, or another one has its parameters; on
            installing.
    """
    optimizer = raw_optimizer(optimizer)
    names = parameter_names(module, optimizer)
    by_name = {name: parameter for parameter, name in names.items()}
    in_order = list(names.values())

    all_names = {canonical(name) for name, _ in module.named_parameters()}
    left_out: set[str] = set()

    def allocate(path: tuple[str | int, ...], entry: TensorStorageMetadata) -> Tensor | None:
        # Whether it is by name or by number is known once the groups are read: then it goes where it belongs.
        name = str(path[1]) if len(path) > 1 and path[0] == "state" else ""
        may_be = [by_name[one] for one in (name, _at(in_order, name)) if one in by_name]
        if not may_be and name in all_names:  # of a parameter that this one does not optimize any more
            left_out.add(name)
            return None
        if not may_be:
            return empty(entry)
        parameter = next((one for one in may_be if one.shape == entry.size), may_be[0])
        if parameter.shape == entry.size and len(entry.size):
            return torch.empty_like(parameter.detach(), dtype=entry.properties.dtype)
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        return empty(entry, local.device if len(entry.size) else "cpu")

    with torch.no_grad():
        tree = reader.tree(f"optimizer_{index}", allocate)

    def install() -> None:
        saved = tree.build()
        saved["state"] = named_by_position(module, saved, in_order)
        groups = saved.get("param_groups", [])
        if len(groups) != len(optimizer.param_groups):
            raise CheckpointIncompatible(
                f"Optimizer {index} has {len(optimizer.param_groups)} parameter groups, the checkpoint {len(groups)}.",
                hint="Configure the optimizer as it was when the checkpoint was saved: groups that a callback added"
                " (add_param_group) have to be there already, in its on_fit_start or in configure_optimizers.",
            )
        numbers = {name: number for number, name in enumerate(in_order)}
        _check_owners(module, reader, index, saved["state"].keys() | left_out, numbers, all_optimizers)
        unknown = saved["state"].keys() - numbers.keys() - all_names
        state: dict[Any, Any] = {numbers[n]: value for n, value in saved["state"].items() if n in numbers}
        state |= {name: value for name, value in saved["state"].items() if name in unknown}
        live_groups = [
            {
                **{name: _beside(value, live.get(name)) for name, value in group.items()},
                "params": [numbers[names[parameter]] for parameter in live["params"]],
            }
            for group, live in zip(groups, optimizer.param_groups, strict=True)
        ]
        optimizer.load_state_dict({**saved, "state": state, "param_groups": live_groups})
        _check_options(optimizer, index)
        _undo_casts(optimizer, {by_name[name]: value for name, value in saved["state"].items() if name in by_name})

    return Part([tree.request], install)


def _beside(saved: Any, live: Any) -> Any:
    """An option of a group; where it is a tensor (a learning rate, say), on the device of the one that it replaces."""
    return saved.to(live.device) if isinstance(saved, Tensor) and isinstance(live, Tensor) else saved


def steps_to_host(optimizer: Mapping[str, Any]) -> None:
    """Have the step counters of a state dict in host memory, where optimizers have them that do not ask for a device's;
    those get them there on loading.  From a device each step would wait for each of them."""
    for entry in optimizer["state"].values():
        if isinstance(entry, dict) and isinstance(step := entry.get("step"), Tensor):
            entry["step"] = step.cpu()


def _check_owners(
    module: torch.nn.Module,
    reader: CheckpointReader,
    index: int,
    saved: Set[str],
    own: Collection[str],
    all_optimizers: Sequence[Any],
) -> None:
    """Tell of state of parameters that another optimizer has now, where they begin without it.

    Args:
        module: the model.
        reader: of the checkpoint.
        index: which optimizer it is.
        saved: the names of parameters that the checkpoint has state of.
        own: the names of those that it optimizes.
        all_optimizers: it and those beside it.

    Raises:
        CheckpointIncompatible: nothing that was saved is of its own: they are others, or in another order.
    """
    for number, other in enumerate(all_optimizers):
        theirs = parameter_names(module, raw_optimizer(other)) if number != index else {}
        trained = {name for parameter, name in theirs.items() if parameter.requires_grad}
        moved = sorted(trained & saved - set(own))
        if moved:
            also = {
                path[2]
                for path in reader.paths.values()
                if path[:2] == (f"optimizer_{number}", "state") and len(path) > 2
            }
            moved = [name for name in moved if name not in also]
        if not moved:
            continue
        names = ", ".join(moved[:4]) + (f" and {len(moved) - 4} more" if len(moved) > 4 else "")
        what = f"The checkpoint's optimizer {index} has the state of {names}, which optimizer {number} has now"
        if saved.isdisjoint(own):
            raise CheckpointIncompatible(
                f"{what}: it would be lost.",
                hint="Configure the optimizers in the order in which they were, or set restore_optimizers=False to go"
                " on with new ones.",
            )
        rank_zero_warn(f"{what}: they begin with none.")


def _check_options(optimizer: Optimizer, index: int) -> None:
    """Raise CheckpointIncompatible where an optimizer has got the options of another kind, and not its own.  Those that
    an earlier version of its kind did not have get their defaults."""
    groups, defaults = optimizer.param_groups, optimizer.defaults
    lacking = {name for group in groups for name in defaults if name not in group}
    foreign = {name for group in groups for name in group if name not in defaults} - OF_ANY_KIND
    for group in groups:
        group.update({name: defaults[name] for name in lacking if name not in group})
    if lacking and foreign:
        raise CheckpointIncompatible(
            f"Optimizer {index} is a {type(optimizer).__name__}; the checkpoint's was of another kind, without"
            f" {', '.join(sorted(lacking))}.",
            hint="Configure the optimizer as it was, or set restore_optimizers=False to go on with a new one.",
        )


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


def named_by_position(
    module: torch.nn.Module, saved: Mapping[str, Any], in_order: Sequence[str] = ()
) -> dict[str, Any]:
    """Optimizer state by name also where it was saved by number (plain ``Optimizer.state_dict``)."""
    state = saved.get("state", {})
    if not _is_numbered(saved):
        return {str(name): value for name, value in state.items()}
    if not in_order:
        in_order = [canonical(name) for name, parameter in module.named_parameters() if parameter.requires_grad]
    return {_at(in_order, str(number)) or str(number): value for number, value in state.items()}


def _is_numbered(saved: Mapping[str, Any]) -> bool:
    """Whether an optimizer's state is by number of parameter, as its groups are."""
    of_groups = [name for group in saved.get("param_groups", ()) for name in group.get("params", ())]
    return all(isinstance(name, int) for name in of_groups)


def _at(in_order: Sequence[str], number: str) -> str | None:
    """The name of the parameter that has a number."""
    return in_order[int(number)] if number.isdecimal() and int(number) < len(in_order) else None


def without_gaps(optimizer: Optimizer) -> dict[str, Any]:
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


def read_numbered(reader: CheckpointReader, index: int) -> dict[str, Any]:
    """An optimizer's state, whole and on the CPU, by number of parameter, as ``load_state_dict`` takes it."""
    return numbered(reader.read_full(f"optimizer_{index}"))


def numbered(optimizer: dict[str, Any]) -> dict[str, Any]:
    """The state of an optimizer by number of parameter, as ``load_state_dict`` takes it, from that by name."""
    names = [name for group in optimizer["param_groups"] for name in group["params"]]
    numbers: dict[str, Any] = {str(name): number for number, name in enumerate(names)}
    groups = [
        {**group, "params": [numbers[str(name)] for name in group["params"]]} for group in optimizer["param_groups"]
    ]
    state = {numbers.get(str(name), name): value for name, value in optimizer.get("state", {}).items()}
    return {**optimizer, "state": state, "param_groups": groups}
