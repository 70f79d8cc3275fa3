"""A model's tensors and objects, on their way from a checkpoint into a module."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from lightning_resilience.errors import CheckpointIncompatible
from lightning_resilience.expanded import contiguous, copy_into, is_expanded
from lightning_resilience.names import canonical
from lightning_resilience.reader import CheckpointReader, Part, empty


def in_place(state: Mapping[str, Any], reader: CheckpointReader, strict: bool) -> Part:
    """The model's tensors, on their way into those of ``state``.

    Raises:
        CheckpointIncompatible: names or shapes do not fit, with both sides listed; values do not, on installing.
    """
    wanted = {canonical(name): value for name, value in state.items()}
    saved = reader.shapes("model")
    check_fit(wanted, saved, strict)
    targets = {
        f"model.{name}": value
        for name, value in wanted.items()
        if saved.get(name) is not None and isinstance(value, Tensor)
    }
    views = {key: value for key, value in targets.items() if is_expanded(value)}
    values = {key: torch.empty(view.shape, dtype=view.dtype, device=view.device) for key, view in views.items()}

    def install() -> None:
        for key, view in views.items():
            copy_into(key.removeprefix("model."), view, values[key])

    return Part([reader.request(targets | values)], install)


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
                saved.setdefault(name, value)  # an empty container, of which stock DCP keeps nothing
        fits = {name: tuple(value.shape) if isinstance(value, Tensor) else None for name, value in saved.items()}
        known = {
            name: None if is_lazy(value) or name.endswith("_extra_state") else value
            for name, (_, value) in live.items()
        }
        check_fit(known, fits, strict)
        with contiguous(module, {name for name, value in state.items() if not is_lazy(value)}):
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
